//! The directory of stored prefixes, and one file of it: opening, reading, and replacing.
//!
//! Owns the directory's descriptor. Invariants: only a directory and regular files that belong to this user and that nobody
//! else may touch are read or written, and no symbolic link is followed; a file is replaced by one that is whole and on the
//! disk, or stays as it was; nothing is handed out of a file as verified before its checksum has been compared.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, FallocateFlags, OFlag, fallocate, open, openat, renameat};
use nix::sys::stat::{Mode, fstatat, mkdirat};
use nix::unistd::{UnlinkatFlags, geteuid, unlinkat};
use sha2::{Digest as _, Sha256};
use thiserror::Error;

use super::format::{FIXED, FormatError, Head, Hex};
use super::stream::{Reader, Way, Writer};
use crate::size::Size;

/// Ends the name of each file; before it stand the 64 digits of the chain.
pub const SUFFIX: &str = ".kvprefix";

/// Why a prefix was not stored, or not taken from its file.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum StoreError {
    #[error(
        "{path}: there is no such directory; make it (install -d -m 0700 -o USER {path}), or let StateDirectory= of the unit make it"
    )]
    NoDirectory { path: PathBuf },
    #[error(
        "{path}: it belongs to uid {owner}, and the broker runs as uid {own}; give it to the broker, or remove it"
    )]
    Owner { path: PathBuf, owner: u32, own: u32 },
    #[error("{path}: others may use it (mode {mode:04o}): chmod {want:04o} it after a look at what is in it")]
    Mode { path: PathBuf, mode: u32, want: u32 },
    #[error("{path}: it is no {want}, or a symbolic link to one")]
    Kind { path: PathBuf, want: &'static str },
    #[error("{path}: {source}; it can be removed, and the prefix saved again")]
    Format { path: PathBuf, source: FormatError },
    #[error(
        "{path}: it is damaged: the checksum of block {block} does not match; remove it, and save the prefix again"
    )]
    Block { path: PathBuf, block: usize },
    #[error(
        "{path}: block {block} is not what was sealed, so it is not saved; the broker drops it: compute the prompt anew"
    )]
    Sealed { path: PathBuf, block: usize },
    #[error("{path}: it holds another chain than its name says: somebody has renamed it")]
    Renamed { path: PathBuf },
    #[error("{path}: it was changed while it was read; load it again")]
    Changed { path: PathBuf },
    #[error("{path}: {bytes} are more than the {limit} of prefix.store.limit")]
    TooLarge { path: PathBuf, bytes: Size, limit: Size },
    #[error(
        "{path}: it would need {bytes}, and {used} of the {limit} of prefix.store.limit are in use; what was stored before stays"
    )]
    OverLimit { path: PathBuf, bytes: Size, used: Size, limit: Size },
    #[error(
        "{path}: it would need {bytes}, and the files of uid {uid} have {used} of the {part} that are a tenant's part of prefix.store.limit (prefix.store.tenant-limit); what was stored before stays"
    )]
    OverPart { path: PathBuf, uid: u32, bytes: Size, used: Size, part: Size },
    #[error("{path}: no space is left for {bytes} on its file system; what was stored before stays")]
    NoSpace { path: PathBuf, bytes: Size },
    #[error("{path}: {call}: {source}")]
    Call { path: PathBuf, call: &'static str, source: io::Error },
}

/// A directory of stored prefixes.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    fd: OwnedFd,
    limit: u64,
    /// The bound of each tenant's files together.
    part: u64,
    /// Whose each file is, as far as that has been looked up; `None` for what is no prefix. It never changes: a chain's
    /// name is made of its tenant.
    owners: RefCell<BTreeMap<String, Option<u32>>>,
    way: Way,
}

/// What a directory holds.
pub type Listing = Vec<(PathBuf, Result<Head, StoreError>)>;

impl Directory {
    /// Opens the directory at `path`; makes it, but not the one it is in, if `make`. All files together may have
    /// `limit` bytes.
    pub fn open(path: &Path, limit: u64, make: bool) -> Result<Self, StoreError> {
        let call = |call| move |e: Errno| StoreError::Call { path: path.into(), call, source: e.into() };
        if make {
            match mkdirat(nix::fcntl::AT_FDCWD, path, Mode::from_bits_truncate(0o700)) {
                Ok(()) | Err(Errno::EEXIST) => {}
                Err(Errno::ENOENT) => return Err(StoreError::NoDirectory { path: path.into() }),
                Err(e) => return Err(call("mkdir")(e)),
            }
        }
        let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_RDONLY;
        let fd = open(path, flags, Mode::empty()).map_err(|e| match e {
            Errno::ENOENT => StoreError::NoDirectory { path: path.into() },
            Errno::ELOOP | Errno::ENOTDIR => StoreError::Kind { path: path.into(), want: "directory" },
            e => call("open")(e),
        })?;
        let file = File::from(fd);
        let meta =
            file.metadata().map_err(|source| StoreError::Call { path: path.into(), call: "stat", source })?;
        strict(path, &meta, 0o700)?;
        let owners = RefCell::default();
        Ok(Directory { path: path.into(), fd: file.into(), limit, part: limit, owners, way: Way::Ring })
    }

    /// The same with a bound for the files of each tenant.
    pub fn with_part(self, part: u64) -> Self {
        Directory { part, ..self }
    }

    /// The path of a chain's file.
    pub fn path_of(&self, chain: &Hex) -> PathBuf {
        self.path.join(name_of(chain))
    }

    fn names(&self) -> Result<Vec<String>, StoreError> {
        let call =
            |source| StoreError::Call { path: self.path.clone(), call: "reading the directory", source };
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(call)? {
            names.extend(entry.map_err(call)?.file_name().into_string().ok());
        }
        names.sort();
        Ok(names)
    }

    /// Every stored prefix, by its head, or why it is none. Files with other names are left alone.
    pub fn list(&self) -> Result<Listing, StoreError> {
        let names = self.names()?.into_iter().filter(|name| name.ends_with(SUFFIX));
        Ok(names
            .map(|name| (self.path.join(&name), self.open_file(&name).map(|(_, head, _)| head)))
            .collect())
    }

    /// Opens one file and reads its head. Returns where its blocks start, too.
    fn open_file(&self, name: &str) -> Result<(File, Head, u64), StoreError> {
        let path = self.path.join(name);
        let io = |call| {
            let path = path.clone();
            move |source| StoreError::Call { path, call, source }
        };
        // Not to be kept waiting by a FIFO that somebody put there.
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let fd = openat(&self.fd, name, flags, Mode::empty()).map_err(|e| match e {
            Errno::ELOOP => StoreError::Kind { path: path.clone(), want: "regular file" },
            e => io("open")(e.into()),
        })?;
        let file = File::from(fd);
        let meta = file.metadata().map_err(io("stat"))?;
        if !meta.is_file() {
            return Err(StoreError::Kind { path, want: "regular file" });
        }
        strict(&path, &meta, 0o600)?;
        if meta.len() > self.limit {
            let (bytes, limit) = (Size::from_bytes(meta.len()), Size::from_bytes(self.limit));
            return Err(StoreError::TooLarge { path, bytes, limit });
        }
        let format = |source| StoreError::Format { path: path.clone(), source };
        let mut fixed = vec![0; FIXED.min(meta.len() as usize)];
        file.read_exact_at(&mut fixed, 0).map_err(io("read"))?;
        let mut bytes = vec![0; Head::head_bytes(&fixed, meta.len()).map_err(format)?];
        file.read_exact_at(&mut bytes, 0).map_err(io("read"))?;
        let head = Head::parse(&bytes, meta.len()).map_err(format)?;
        match name == name_of(&head.chain()) {
            true => Ok((file, head, bytes.len() as u64)),
            false => Err(StoreError::Renamed { path }),
        }
    }

    /// Hands the blocks of a file that was [listed](Self::list) to `take`, in order: number of the block, where in it,
    /// bytes. Only when this returns are they verified.
    pub fn read(
        &self,
        listed: &Head,
        mut take: impl FnMut(usize, u64, &[u8]) -> io::Result<()>,
    ) -> Result<(), StoreError> {
        let name = name_of(&listed.chain());
        let path = self.path.join(&name);
        let (file, head, start) = self.open_file(&name)?;
        if head != *listed {
            return Err(StoreError::Changed { path });
        }
        let (mut block, mut at, mut hash) = (0, 0, Sha256::new());
        let mut damaged = None;
        let mut reader = Reader::new(&file, start, start + head.data_bytes(), self.way);
        let mut eat = |mut bytes: &[u8]| {
            while !bytes.is_empty() {
                let some = usize::try_from(head.block_bytes - at).unwrap_or(usize::MAX).min(bytes.len());
                hash.update(&bytes[..some]);
                take(block, at, &bytes[..some])?;
                at += some as u64;
                bytes = &bytes[some..];
                if at == head.block_bytes {
                    let sum: [u8; 32] = hash.finalize_reset().into();
                    if sum != head.blocks[block].sha256.0 {
                        damaged = Some(block);
                        return Err(io::ErrorKind::InvalidData.into());
                    }
                    (block, at) = (block + 1, 0);
                }
            }
            Ok(())
        };
        let read = loop {
            match reader.next(&mut eat) {
                Ok(true) => {}
                other => break other,
            }
        };
        match (damaged, read) {
            (Some(block), _) => Err(StoreError::Block { path, block }),
            (None, Err(source)) => Err(StoreError::Call { path, call: "read", source }),
            (None, Ok(_)) => Ok(()),
        }
    }

    /// Stores a prefix: `give` fills in the bytes of block `n` from an offset on. The checksums of the head are
    /// computed from them. Returns the bytes of the file.
    pub fn write(
        &self,
        mut head: Head,
        mut give: impl FnMut(usize, u64, &mut [u8]) -> io::Result<()>,
    ) -> Result<u64, StoreError> {
        let chain = head.chain();
        let (name, temporary) = (name_of(&chain), format!(".{chain}.new"));
        let path = self.path.join(&name);
        let start = head.to_bytes().len() as u64;
        let bytes = start.saturating_add(head.data_bytes());
        self.remove_unfinished()?;
        let (used, own) = self.used_without(&name, head.tenant)?;
        if own.saturating_add(bytes) > self.part {
            let [bytes, used, part] = [bytes, own, self.part].map(Size::from_bytes);
            return Err(StoreError::OverPart { path, uid: head.tenant, bytes, used, part });
        }
        if used.saturating_add(bytes) > self.limit {
            let [bytes, used, limit] = [bytes, used, self.limit].map(Size::from_bytes);
            return Err(StoreError::OverLimit { path, bytes, used, limit });
        }
        let named = |call: &'static str| {
            let path = path.clone();
            move |source: io::Error| match source.raw_os_error() {
                Some(libc::ENOSPC | libc::EDQUOT) => {
                    StoreError::NoSpace { path, bytes: Size::from_bytes(bytes) }
                }
                _ => StoreError::Call { path, call, source },
            }
        };
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let fd = openat(&self.fd, temporary.as_str(), flags, Mode::from_bits_truncate(0o600))
            .map_err(|e| named("create")(e.into()))?;
        let file = File::from(fd);
        let written = (|| {
            // A disk that is too full says so here, before anything has been read from the pool.
            match fallocate(&file, FallocateFlags::empty(), 0, bytes as i64) {
                Ok(()) | Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => {}
                Err(e) => return Err(named("fallocate")(e.into())),
            }
            let mut writer = Writer::new(&file, start, self.way);
            let mut buffer = vec![0; head.block_bytes.min(256 << 10) as usize];
            for block in 0..head.blocks.len() {
                let (mut at, mut hash) = (0, Sha256::new());
                while at < head.block_bytes {
                    let some = (head.block_bytes - at).min(buffer.len() as u64) as usize;
                    give(block, at, &mut buffer[..some]).map_err(named("reading the pool"))?;
                    hash.update(&buffer[..some]);
                    writer.put(&buffer[..some]).map_err(named("write"))?;
                    at += some as u64;
                }
                head.blocks[block].sha256 = Hex(hash.finalize().into());
            }
            writer.end().map_err(named("write"))?;
            // Last: a file without its head is none.
            file.write_all_at(&head.to_bytes(), 0).map_err(named("write"))?;
            file.sync_all().map_err(named("fsync"))?;
            renameat(&self.fd, temporary.as_str(), &self.fd, name.as_str())
                .map_err(|e| named("rename")(e.into()))?;
            nix::unistd::fsync(&self.fd).map_err(|e| named("fsync of the directory")(e.into()))
        })();
        if written.is_err() {
            let _ = unlinkat(&self.fd, temporary.as_str(), UnlinkatFlags::NoRemoveDir);
        }
        written.map(|()| {
            self.owners.borrow_mut().insert(name, Some(head.tenant));
            bytes
        })
    }

    /// Removes the file of a chain. `false` if there is none.
    pub fn remove(&self, chain: &Hex) -> Result<bool, StoreError> {
        let name = name_of(chain);
        let call = |call| {
            let path = self.path.join(&name);
            move |e: Errno| StoreError::Call { path, call, source: e.into() }
        };
        match unlinkat(&self.fd, name.as_str(), UnlinkatFlags::NoRemoveDir) {
            Ok(()) => {}
            Err(Errno::ENOENT) => return Ok(false),
            Err(e) => return Err(call("unlink")(e)),
        }
        nix::unistd::fsync(&self.fd).map_err(call("fsync of the directory"))?;
        Ok(true)
    }

    /// Files that were begun and not finished go: nobody else writes here.
    fn remove_unfinished(&self) -> Result<(), StoreError> {
        for name in self.names()?.iter().filter(|n| n.starts_with('.') && n.ends_with(".new")) {
            let _ = unlinkat(&self.fd, name.as_str(), UnlinkatFlags::NoRemoveDir);
        }
        Ok(())
    }

    /// Bytes of all stored prefixes but this one, and of those of one tenant. What else lies there is not the store's.
    fn used_without(&self, but: &str, tenant: u32) -> Result<(u64, u64), StoreError> {
        let (mut sum, mut own) = (0u64, 0u64);
        for name in self.names()?.iter().filter(|n| n.ends_with(SUFFIX) && *n != but) {
            let path = || self.path.join(name);
            match fstatat(&self.fd, name.as_str(), AtFlags::AT_SYMLINK_NOFOLLOW) {
                Ok(meta) => {
                    let bytes = meta.st_size as u64;
                    sum = sum.saturating_add(bytes);
                    if self.owner_of(name) == Some(tenant) {
                        own = own.saturating_add(bytes);
                    }
                }
                Err(Errno::ENOENT) => {}
                Err(e) => return Err(StoreError::Call { path: path(), call: "stat", source: e.into() }),
            }
        }
        Ok((sum, own))
    }

    /// Whose a file is, by its head. What cannot be read is nobody's, and counts in the sum of all.
    fn owner_of(&self, name: &str) -> Option<u32> {
        if let Some(known) = self.owners.borrow().get(name) {
            return *known;
        }
        let owner = self.open_file(name).ok().map(|(_, head, _)| head.tenant);
        self.owners.borrow_mut().insert(name.into(), owner);
        owner
    }
}

/// As strict as the socket: its own user's, and nobody else's to read or write.
fn strict(path: &Path, meta: &std::fs::Metadata, want: u32) -> Result<(), StoreError> {
    let (owner, own, mode) = (meta.uid(), geteuid().as_raw(), meta.mode() & 0o7777);
    if owner != own {
        return Err(StoreError::Owner { path: path.into(), owner, own });
    }
    if mode & 0o077 != 0 {
        return Err(StoreError::Mode { path: path.into(), mode, want });
    }
    Ok(())
}

fn name_of(chain: &Hex) -> String {
    format!("{chain}{SUFFIX}")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::super::format::tests::head;
    use super::*;

    const LIMIT: u64 = 1 << 20;

    fn fill(block: usize, at: u64, out: &mut [u8]) -> io::Result<()> {
        out.iter_mut().enumerate().for_each(|(i, b)| *b = (block as u64 * 37 + at + i as u64) as u8);
        Ok(())
    }

    fn stored() -> (tempfile::TempDir, Directory, PathBuf) {
        let parent = tempfile::tempdir().unwrap();
        let directory = Directory::open(&parent.path().join("prefixes"), LIMIT, true).unwrap();
        directory.write(head(3), fill).unwrap();
        let path = directory.path_of(&head(3).chain());
        (parent, directory, path)
    }

    fn listed(directory: &Directory) -> Result<Head, String> {
        let mut all = directory.list().unwrap();
        assert_eq!(all.len(), 1);
        all.pop().unwrap().1.map_err(|e| e.to_string())
    }

    fn read(directory: &Directory, head: &Head) -> Result<(), String> {
        let mut want = vec![0; head.block_bytes as usize];
        directory
            .read(head, |block, at, bytes| {
                fill(block, at, &mut want[..bytes.len()])?;
                assert_eq!(bytes, &want[..bytes.len()], "block {block} from {at}");
                Ok(())
            })
            .map_err(|e| e.to_string())
    }

    #[test]
    fn a_stored_prefix_is_read_back_and_is_nobody_elses() {
        let (_parent, directory, path) = stored();
        let mode = |p: &Path| std::fs::metadata(p).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        let head = listed(&directory).unwrap();
        read(&directory, &head).unwrap();
        // Once more over it, and by plain calls.
        let plain = Directory { way: Way::Plain, ..directory };
        plain.write(super::super::format::tests::head(3), fill).unwrap();
        assert_eq!(listed(&plain).unwrap(), head);
        read(&plain, &head).unwrap();
        assert!(plain.remove(&head.chain()).unwrap() && !plain.remove(&head.chain()).unwrap());
        assert!(plain.list().unwrap().is_empty());
    }

    #[test]
    fn every_block_that_was_changed_and_every_cut_file_is_refused_by_name() {
        let (_parent, directory, path) = stored();
        let head = listed(&directory).unwrap();
        let good = std::fs::read(&path).unwrap();
        let start = good.len() - head.data_bytes() as usize;
        for at in (start..good.len()).step_by(509).chain([start, good.len() - 1]) {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            std::fs::write(&path, bad).unwrap();
            let said = directory.read(&head, |_, _, _| Ok(())).unwrap_err().to_string();
            let block = (at - start) / head.block_bytes as usize;
            assert!(said.contains(&format!("checksum of block {block}")), "{said}");
            assert!(said.contains(&path.display().to_string()), "{said}");
        }
        for len in (0..good.len()).step_by(61) {
            std::fs::write(&path, &good[..len]).unwrap();
            let said = listed(&directory).unwrap_err();
            assert!(said.contains(&path.display().to_string()), "{said}");
        }
        std::fs::write(&path, [&good[..], b"x"].concat()).unwrap();
        assert!(listed(&directory).unwrap_err().contains("longer than it says"));
        std::fs::write(&path, vec![0; LIMIT as usize + 1]).unwrap();
        assert!(listed(&directory).unwrap_err().contains("prefix.store.limit"));
    }

    #[test]
    fn one_tenants_files_leave_the_others_their_parts_of_the_bound() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("prefixes");
        let one = head(3).to_bytes().len() as u64 + head(3).data_bytes();
        let open = || Directory::open(&path, 4 * one, true).unwrap().with_part(2 * one);
        // Chains of other names, as other prompts have them.
        let of = |tenant: u32, n: u8| {
            let mut head = Head { tenant, ..head(3) };
            head.blocks[2].name = Hex([n; 32]);
            head
        };
        let directory = open();
        for n in 1..=2 {
            directory.write(of(1, n), fill).unwrap();
        }
        // Whose the files are is known by this run, and found out by the next one.
        for directory in [directory, open()] {
            let said = directory.write(of(1, 3), fill).unwrap_err().to_string();
            assert!(said.contains("the files of uid 1 have") && said.contains("tenant-limit"), "{said}");
            // One that is there already is replaced.
            directory.write(of(1, 2), fill).unwrap();
        }
        let directory = open();
        for n in 4..=5 {
            directory.write(of(2, n), fill).unwrap();
        }
        assert!(matches!(directory.write(of(3, 6), fill), Err(StoreError::OverLimit { .. })));
        directory.remove(&Hex([1; 32])).unwrap();
        directory.write(of(1, 3), fill).unwrap();
    }

    #[test]
    fn what_others_may_touch_or_have_made_is_not_read() {
        let (parent, directory, path) = stored();
        let mode = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        mode(&path, 0o640);
        assert!(listed(&directory).unwrap_err().contains("chmod 0600"));
        mode(&path, 0o600);
        assert!(listed(&directory).is_ok());
        let elsewhere = parent.path().join("elsewhere");
        std::fs::rename(&path, &elsewhere).unwrap();
        symlink(&elsewhere, &path).unwrap();
        assert!(listed(&directory).unwrap_err().contains("symbolic link"));
        std::fs::remove_file(&path).unwrap();
        nix::unistd::mkfifo(&path, Mode::from_bits_truncate(0o600)).unwrap();
        assert!(listed(&directory).unwrap_err().contains("regular file"));
        std::fs::remove_file(&path).unwrap();
        let renamed = path.with_file_name(format!("{}{SUFFIX}", "ab".repeat(32)));
        std::fs::rename(&elsewhere, &renamed).unwrap();
        assert!(listed(&directory).unwrap_err().contains("renamed"));
        std::fs::rename(&renamed, &path).unwrap();
        if geteuid().is_root() {
            chown(&path, Some(4001), None).unwrap();
            assert!(listed(&directory).unwrap_err().contains("belongs to uid 4001"));
        }
        let place = path.parent().unwrap();
        let open = || Directory::open(place, LIMIT, true).unwrap_err().to_string();
        mode(place, 0o750);
        assert!(open().contains("chmod 0700"));
        mode(place, 0o700);
        let link = parent.path().join("link");
        symlink(place, &link).unwrap();
        assert!(Directory::open(&link, LIMIT, false).unwrap_err().to_string().contains("symbolic link"));
        assert!(matches!(
            Directory::open(&parent.path().join("no/where"), LIMIT, true),
            Err(StoreError::NoDirectory { .. })
        ));
    }

    #[test]
    fn a_prefix_that_does_not_fit_or_cannot_be_read_leaves_the_old_file_as_it_was() {
        let (_parent, directory, path) = stored();
        let before = std::fs::read(&path).unwrap();
        let small = Directory { limit: before.len() as u64 + 100, ..directory };
        // The same chain again fits; another one beside it does not.
        small.write(head(3), fill).unwrap();
        let said = small.write(head(2), fill).unwrap_err().to_string();
        assert!(said.contains("prefix.store.limit"), "{said}");
        let e = small.write(head(3), |_, _, _| Err(io::ErrorKind::Other.into())).unwrap_err();
        assert!(e.to_string().contains("reading the pool"), "{e}");
        assert_eq!(std::fs::read(&path).unwrap(), before);
        assert_eq!(small.names().unwrap().len(), 1, "nothing is left behind");
        // What saves that were interrupted have left behind is no obstacle, and what others have put there neither.
        for chain in [head(3).chain(), head(2).chain()] {
            std::fs::write(path.with_file_name(format!(".{chain}.new")), &before).unwrap();
        }
        std::fs::write(path.with_file_name("notes"), &before).unwrap();
        small.write(head(3), fill).unwrap();
        assert_eq!(small.names().unwrap().len(), 2);
    }
}
