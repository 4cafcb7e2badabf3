//! A board as files: /sys, /proc, /dev and what else tells how it is set up, below a root directory.
//!
//! Owns nothing but the root. Invariants: every path that the doctor looks at goes through here, so a recorded tree is
//! examined as the board itself is, and a link of the board's leads to what it leads to there, never out of the tree; nothing
//! is opened but regular files and directories, and of a file no more than so much is read; what cannot be read is absent,
//! never a guess.
//!
//! A tree in a repository keeps no owners and no device nodes. There the file `.nodes` says what they were on the board,
//! a line each, `KIND MODE UID GID /PATH`, and the nodes are empty files:
//! `find dev/dma_heap run/kvbroker -printf '%y %m %U %G /%p\n' >.nodes`.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

/// More than this is no setting of a kernel.
const MOST: u64 = 4 << 20;
/// Links on the way to a file, as the kernel counts them (MAXSYMLINKS, include/linux/namei.h).
const MOST_LINKS: u32 = 40;

/// Owner and rights of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Node {
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// Somebody who wants to open a file.
#[derive(Debug, Clone, Default)]
pub(super) struct Person {
    pub uid: u32,
    pub gids: Vec<u32>,
}

impl Node {
    /// Whether `person` may read and write, by the classes of the mode: owner, else group, else others.
    pub fn opens_for(&self, person: &Person) -> bool {
        let bits = if person.uid == 0 {
            6
        } else if person.uid == self.uid {
            self.mode >> 6
        } else if person.gids.contains(&self.gid) {
            self.mode >> 3
        } else {
            self.mode
        };
        bits & 6 == 6
    }
}

/// The board's files.
#[derive(Debug)]
pub(super) struct Tree {
    root: PathBuf,
    /// The tree is the machine that this runs on, where the kernel itself finds the way.
    pub here: bool,
    recorded: BTreeMap<String, Node>,
}

impl Tree {
    /// The board below `root`: `/` for this one.
    pub fn new(root: &Path) -> io::Result<Self> {
        fs::read_dir(root)?;
        let here = fs::canonicalize(root)? == Path::new("/");
        let mut tree = Tree { root: root.into(), here, recorded: BTreeMap::new() };
        let text = tree.text("/.nodes").unwrap_or_default();
        tree.recorded = text.lines().filter_map(parse_node).collect();
        Ok(tree)
    }

    /// Where `path` of the board is on this machine. Links are followed as on the board: one that begins at the root
    /// begins at the tree's, and none leads out of it. What is not there has a place all the same.
    pub fn real(&self, path: impl AsRef<Path>) -> PathBuf {
        self.resolve(path.as_ref(), true)
    }

    fn resolve(&self, path: &Path, last: bool) -> PathBuf {
        if self.here {
            return Path::new("/").join(path);
        }
        // What is still to be gone, the next step at the end; and what has been gone below the root, free of links.
        let steps =
            |path: &Path| path.components().rev().map(|c| c.as_os_str().to_owned()).collect::<Vec<_>>();
        let (mut ahead, mut gone, mut links) = (steps(path), PathBuf::new(), 0);
        while let Some(step) = ahead.pop() {
            match Path::new(&step).components().next() {
                Some(Component::RootDir) => gone = PathBuf::new(),
                Some(Component::ParentDir) => _ = gone.pop(),
                Some(Component::Normal(name)) => {
                    let next = gone.join(name);
                    let follow = links < MOST_LINKS && (last || !ahead.is_empty());
                    match follow.then(|| fs::read_link(self.root.join(&next))) {
                        Some(Ok(target)) => {
                            links += 1;
                            ahead.extend(steps(&target));
                        }
                        _ => gone = next,
                    }
                }
                _ => {}
            }
        }
        self.root.join(gone)
    }

    /// The text of a regular file without white space at its ends.
    pub fn text(&self, path: &str) -> Option<String> {
        let path = self.real(path);
        // Looked at before it is opened, since to open a device may do something; and again, as what was opened.
        let regular = |meta: io::Result<fs::Metadata>| meta.ok().filter(fs::Metadata::is_file);
        regular(fs::metadata(&path))?;
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY | if self.here { 0 } else { libc::O_NOFOLLOW };
        let file = fs::File::options().read(true).custom_flags(flags).open(&path).ok()?;
        regular(file.metadata())?;
        let mut bytes = Vec::new();
        file.take(MOST).read_to_end(&mut bytes).ok()?;
        // Device-tree strings end with a zero byte.
        let text = String::from_utf8_lossy(&bytes);
        Some(text.trim_matches(|c: char| c.is_whitespace() || c == '\0').to_owned())
    }

    /// A file that is one number.
    pub fn number(&self, path: &str) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    /// The value of `key` in a file of lines `key: value`, without its unit.
    pub fn field(&self, path: &str, key: &str) -> Option<u64> {
        let text = self.text(path)?;
        let line = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
        line.split_whitespace().next()?.parse().ok()
    }

    /// What is in a directory, sorted; nothing if it is not there.
    pub fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.real(path)).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Whether something is at `path`, be it a link that leads nowhere.
    pub fn exists(&self, path: &str) -> bool {
        fs::symlink_metadata(self.resolve(Path::new(path), false)).is_ok()
    }

    /// The last name of where a link leads.
    pub fn link(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.resolve(Path::new(path), false)).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    }

    /// Owner and rights of what is at `path`.
    pub fn node(&self, path: &str) -> Option<Node> {
        if let Some(node) = self.recorded.get(path) {
            return Some(*node);
        }
        // A link that is left at the end leads round in a circle.
        let real = self.real(path);
        let meta = if self.here { fs::metadata(real) } else { fs::symlink_metadata(real) }.ok()?;
        Some(Node { mode: meta.mode() & 0o7777, uid: meta.uid(), gid: meta.gid() })
    }

    /// A user's uid and all its groups, by /etc/passwd and /etc/group.
    pub fn person(&self, name: &str) -> Option<Person> {
        let passwd = self.text("/etc/passwd")?;
        let fields: Vec<&str> =
            passwd.lines().map(str::trim).find(|l| first(l) == name)?.split(':').collect();
        let (uid, gid) = (fields.get(2)?.parse().ok()?, fields.get(3)?.parse().ok()?);
        let mut gids = vec![gid];
        for (_, gid, members) in self.groups() {
            if members.iter().any(|m| m == name) {
                gids.push(gid);
            }
        }
        Some(Person { uid, gids })
    }

    /// Groups with their gids and members.
    pub fn groups(&self) -> Vec<(String, u32, Vec<String>)> {
        let text = self.text("/etc/group").unwrap_or_default();
        let parse = |line: &str| {
            let fields: Vec<&str> = line.split(':').collect();
            let members = fields.get(3)?.split(',').filter(|m| !m.is_empty()).map(String::from).collect();
            Some((fields[0].to_owned(), fields.get(2)?.parse().ok()?, members))
        };
        text.lines().filter_map(parse).collect()
    }

    /// The name of a group, or its number.
    pub fn group_name(&self, gid: u32) -> String {
        let found = self.groups().into_iter().find(|(_, g, _)| *g == gid);
        found.map_or_else(|| gid.to_string(), |(name, ..)| name)
    }
}

fn first(line: &str) -> &str {
    line.split(':').next().unwrap_or_default()
}

fn parse_node(line: &str) -> Option<(String, Node)> {
    let mut words = line.split_whitespace().skip(1);
    let mode = u32::from_str_radix(words.next()?, 8).ok()?;
    let (uid, gid) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    Some((words.next()?.to_owned(), Node { mode, uid, gid }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_that_may_not_write_keeps_its_members_out_though_others_may() {
        let node = Node { mode: 0o646, uid: 0, gid: 44 };
        let member = Person { uid: 1000, gids: vec![44] };
        let stranger = Person { uid: 1000, gids: vec![1000] };
        assert!(!node.opens_for(&member) && node.opens_for(&stranger));
        assert!(node.opens_for(&Person::default()), "root");
    }

    #[test]
    fn recorded_nodes_stand_for_what_a_repository_cannot_keep() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(".nodes"), "c 660 0 990 /dev/dma_heap/reserved\nnonsense\n").unwrap();
        let tree = Tree::new(dir.path()).unwrap();
        let node = tree.node("/dev/dma_heap/reserved").unwrap();
        assert_eq!(node, Node { mode: 0o660, uid: 0, gid: 990 });
        assert_eq!(tree.node("/dev/null"), None, "never the machine's own");
    }

    #[test]
    fn links_lead_to_what_they_lead_to_on_the_board_and_never_out_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let (root, outside) = (dir.path().join("board"), dir.path().join("outside"));
        fs::create_dir_all(root.join("etc/deep")).unwrap();
        fs::create_dir_all(root.join("usr/etc")).unwrap();
        fs::write(&outside, "the machine's").unwrap();
        fs::write(root.join("usr/etc/group"), "the board's").unwrap();
        let link = |at: &str, to: &str| std::os::unix::fs::symlink(to, root.join(at)).unwrap();
        link("etc/absolute", "/usr/etc/group");
        link("etc/deep/up", "../../usr/etc/group");
        link("etc/far-up", "../../../../../../usr/etc/group");
        link("lib", "usr");
        link("etc/through", "/lib/etc/group");
        link("etc/circle", "circle");
        link("etc/out", outside.to_str().unwrap());
        link("etc/out-by-parents", "../../outside");
        let tree = Tree::new(&root).unwrap();
        for path in ["absolute", "deep/up", "far-up", "through"] {
            assert_eq!(tree.text(&format!("/etc/{path}")).as_deref(), Some("the board's"), "{path}");
        }
        for path in ["circle", "out", "out-by-parents"] {
            assert_eq!(tree.text(&format!("/etc/{path}")), None, "{path}");
            assert!(tree.exists(&format!("/etc/{path}")), "the link itself is there: {path}");
        }
        assert_eq!(tree.names("/lib/etc"), ["group"]);
        assert_eq!(tree.node("/etc/out"), None);
        assert_eq!(tree.link("/etc/through").as_deref(), Some("group"));
    }

    #[test]
    fn pipes_are_not_waited_for_and_what_has_no_end_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("proc")).unwrap();
        let pipe = |name: &str| nix::unistd::mkfifo(&dir.path().join(name), nix::sys::stat::Mode::S_IRWXU);
        pipe("proc/meminfo").unwrap();
        pipe(".nodes").unwrap();
        let tree = Tree::new(dir.path()).unwrap();
        assert_eq!(tree.text("/proc/meminfo"), None);
        fs::write(dir.path().join("proc/long"), vec![b'x'; 2 * MOST as usize]).unwrap();
        assert_eq!(tree.text("/proc/long").unwrap().len() as u64, MOST);
        // On this machine itself as well.
        assert_eq!(Tree::new(Path::new("/")).unwrap().text("/dev/zero"), None);
    }
}
