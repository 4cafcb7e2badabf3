//! `scripts/install-overlay` over boards that are directories.

use std::path::{Path, PathBuf};
use std::process::Command;

struct Board {
    dir: tempfile::TempDir,
}

impl Board {
    /// An Armbian board whose armbianEnv.txt is `env` and whose newest kernel is `kernel`.
    fn new(kernel: &str, env: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let board = Board { dir };
        for path in ["boot", "usr/share/kvbroker/overlays", "lib/modules/5.10.1-old"] {
            std::fs::create_dir_all(board.at(path)).unwrap();
        }
        std::fs::create_dir_all(board.at("lib/modules").join(kernel)).unwrap();
        std::fs::write(board.at("boot/armbianEnv.txt"), env).unwrap();
        for name in ["kvbroker-rk3588", "kvbroker-rk3588-own"] {
            let path = board.at("usr/share/kvbroker/overlays").join(format!("{name}.dtbo"));
            std::fs::write(path, tree(name)).unwrap();
        }
        board
    }

    fn at(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    /// Exit status and what was said.
    fn install(&self, more: &[&str]) -> (Option<i32>, String) {
        run(Command::new("sh").arg(script()).arg("--root").arg(self.dir.path()).args(more))
    }

    /// The same where no file may have more than 512 bytes: writing fails as on a full partition.
    fn install_where_it_is_full(&self, more: &[&str]) -> (Option<i32>, String) {
        let full = "trap '' XFSZ; ulimit -f 1; exec sh \"$@\"";
        let mut command = Command::new("sh");
        command.args(["-c", full, "sh"]).arg(script()).arg("--root").arg(self.dir.path());
        run(command.args(more))
    }

    fn env(&self) -> String {
        std::fs::read_to_string(self.at("boot/armbianEnv.txt")).unwrap()
    }

    fn installed(&self) -> Vec<String> {
        self.names("boot/overlay-user")
    }

    fn names(&self, path: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.at(path)).into_iter().flatten();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/install-overlay")
}

fn run(command: &mut Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(said).unwrap())
}

/// What begins as a flattened device tree and has its length.
fn tree(content: &str) -> Vec<u8> {
    let bytes = 8 + content.len() as u32;
    [&0xd00d_feed_u32.to_be_bytes()[..], &bytes.to_be_bytes(), content.as_bytes()].concat()
}

#[test]
fn an_older_kernel_gets_the_variant_that_makes_the_region_the_default_one() {
    let board = Board::new("6.18.2-current-rockchip64", "verbosity=1\nextraargs=quiet");
    let (code, said) = board.install(&[]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(board.env(), "verbosity=1\nextraargs=quiet\nuser_overlays=kvbroker-rk3588\n");
    assert_eq!(board.installed(), ["kvbroker-rk3588.dtbo"]);
    let overlay = std::fs::read(board.at("boot/overlay-user/kvbroker-rk3588.dtbo")).unwrap();
    assert_eq!(overlay, tree("kvbroker-rk3588"));
}

#[test]
fn a_newer_kernel_gets_a_region_of_the_brokers_own_and_other_overlays_stay() {
    for kernel in ["6.19.0-edge-rockchip64", "7.3.4-edge-rockchip64"] {
        let board = Board::new(kernel, "user_overlays=fan uart3\nextraargs=cma=128M\n");
        let (code, said) = board.install(&[]);
        assert_eq!(code, Some(0), "cma= does not concern it: {said}");
        assert_eq!(board.env(), "extraargs=cma=128M\nuser_overlays=fan uart3 kvbroker-rk3588-own\n");
    }
}

#[test]
fn a_size_on_the_command_line_that_would_replace_the_region_is_a_refusal_that_changes_nothing() {
    let env = "verbosity=1\nextraargs=quiet cma=256M\n";
    let board = Board::new("6.1.84-vendor-rk35xx", env);
    let (code, said) = board.install(&[]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("cma=256M on the kernel's command line would replace"), "{said}");
    assert!(said.contains("extraargs="), "{said}");
    assert_eq!((board.env().as_str(), board.installed()), (env, Vec::new()));
}

#[test]
fn installing_twice_changes_nothing_and_a_kernel_upgrade_changes_the_variant() {
    let board = Board::new("6.12.9-current-rockchip64", "user_overlays=fan\n");
    assert_eq!(board.install(&[]).0, Some(0));
    let once = board.env();
    let (code, said) = board.install(&[]);
    assert_eq!((code, board.env()), (Some(0), once), "{said}");
    assert!(said.contains("installed already"), "{said}");
    assert_eq!(board.install(&["--kernel", "6.19.1"]).0, Some(0));
    assert_eq!(board.env(), "user_overlays=fan kvbroker-rk3588-own\n");
    assert_eq!(board.install(&["--remove"]).0, Some(0));
    assert_eq!((board.env().as_str(), board.installed()), ("user_overlays=fan\n", Vec::new()));
}

#[test]
fn what_is_no_armbian_board_is_refused_with_what_to_do_by_hand() {
    let board = Board::new("6.19.0", "");
    std::fs::remove_file(board.at("boot/armbianEnv.txt")).unwrap();
    let (code, said) = board.install(&[]);
    assert_eq!(code, Some(1));
    assert!(said.contains("Armbian") && said.contains("kvbroker-rk3588-own.dtbo"), "{said}");
    let (code, said) = Board::new("unknown", "").install(&["--kernel", "new"]);
    assert_eq!(code, Some(1));
    assert!(said.contains("--kernel"), "{said}");
    let board = Board::new("6.19.0", "");
    std::fs::remove_file(board.at("usr/share/kvbroker/overlays/kvbroker-rk3588-own.dtbo")).unwrap();
    let (code, said) = board.install(&[]);
    assert_eq!((code, board.env().as_str()), (Some(1), ""), "{said}");
    assert_eq!(board.install(&["--nonsense"]).0, Some(2));
}

#[test]
fn what_is_no_overlay_or_no_place_for_one_is_refused_and_nothing_changes() {
    let env = "user_overlays=fan\n";
    let board = Board::new("6.18.0", env);
    let source = board.at("usr/share/kvbroker/overlays/kvbroker-rk3588.dtbo");
    let whole = tree("kvbroker-rk3588");
    for wrong in [&b""[..], b"kvbroker-rk3588", &whole[..whole.len() - 1], &[&whole[..], b"x"].concat()] {
        std::fs::write(&source, wrong).unwrap();
        let (code, said) = board.install(&[]);
        assert_eq!((code, board.env().as_str(), board.installed()), (Some(1), env, Vec::new()), "{said}");
        assert!(said.contains("no device-tree overlay, or not all of one"), "{said}");
    }
    std::fs::write(&source, whole).unwrap();
    std::fs::create_dir_all(board.at("boot/overlay-user/kvbroker-rk3588.dtbo")).unwrap();
    let (code, said) = board.install(&[]);
    assert_eq!((code, board.env().as_str()), (Some(1), env), "{said}");
    assert!(said.contains("is there and is no file"), "{said}");
    // An empty variable is not the running system.
    for option in ["--root", "--kernel", "--overlays"] {
        assert_eq!(run(Command::new("sh").arg(script()).args([option, ""])).0, Some(2));
    }
}

#[test]
fn a_full_partition_is_a_refusal_that_leaves_nothing_behind() {
    let line = format!("extraargs={}\n", "x".repeat(600));
    let env = format!("user_overlays=fan\n{line}");
    let board = Board::new("6.18.0", &env);
    let unchanged = |said: &str, overlays: &[&str], env: &str| {
        assert!(said.contains("cannot be written: no room on its partition"), "{said}");
        assert_eq!((board.env().as_str(), board.names("boot").len()), (env, 2), "{said}");
        assert_eq!(board.installed(), overlays, "{said}");
    };
    // There is room for the overlay only, then for neither.
    let (code, said) = board.install_where_it_is_full(&[]);
    assert_eq!(code, Some(1), "{said}");
    unchanged(&said, &[], &env);
    let source = board.at("usr/share/kvbroker/overlays/kvbroker-rk3588.dtbo");
    std::fs::write(&source, tree(&"x".repeat(1000))).unwrap();
    let (code, said) = board.install_where_it_is_full(&[]);
    assert_eq!(code, Some(1), "{said}");
    unchanged(&said, &[], &env);
    // To remove what was never installed needs no room.
    let (code, said) = board.install_where_it_is_full(&["--remove"]);
    assert_eq!((code, board.env()), (Some(0), env), "{said}");
    std::fs::write(&source, tree("small")).unwrap();
    assert_eq!(board.install(&[]).0, Some(0));
    let (code, said) = board.install_where_it_is_full(&["--remove"]);
    assert_eq!(code, Some(1), "{said}");
    unchanged(&said, &["kvbroker-rk3588.dtbo"], &format!("{line}user_overlays=fan kvbroker-rk3588\n"));
    assert_eq!(board.install(&["--remove"]).0, Some(0));
    assert_eq!((board.env(), board.installed()), (format!("{line}user_overlays=fan\n"), Vec::new()));
}

#[test]
fn links_are_followed_on_the_board_and_never_out_of_it() {
    use std::os::unix::fs::symlink;
    for target in ["real/armbianEnv.txt", "/boot/real/armbianEnv.txt"] {
        let board = Board::new("6.18.0", "");
        std::fs::create_dir(board.at("boot/real")).unwrap();
        std::fs::write(board.at("boot/real/armbianEnv.txt"), "a=1\n").unwrap();
        std::fs::remove_file(board.at("boot/armbianEnv.txt")).unwrap();
        symlink(target, board.at("boot/armbianEnv.txt")).unwrap();
        assert_eq!(board.install(&[]).0, Some(0));
        assert!(std::fs::symlink_metadata(board.at("boot/armbianEnv.txt")).unwrap().is_symlink());
        let env = std::fs::read_to_string(board.at("boot/real/armbianEnv.txt")).unwrap();
        assert_eq!(env, "a=1\nuser_overlays=kvbroker-rk3588\n");
    }
    let (board, host) = (Board::new("6.18.0", ""), tempfile::tempdir().unwrap());
    symlink(host.path(), board.at("boot/overlay-user")).unwrap();
    let (code, said) = board.install(&[]);
    assert_eq!((code, board.env().as_str()), (Some(1), ""), "{said}");
    assert!(said.contains("leads out of"), "{said}");
    assert_eq!(std::fs::read_dir(host.path()).unwrap().count(), 0);
    // A link that somebody has left where the new file is written is replaced, not followed.
    let board = Board::new("6.18.0", "");
    symlink(host.path().join("victim"), board.at("boot/armbianEnv.txt.kvbroker-new")).unwrap();
    assert_eq!(board.install(&[]).0, Some(0));
    assert_eq!(std::fs::read_dir(host.path()).unwrap().count(), 0);
}

#[test]
fn lines_of_another_system_stay_as_they_are_and_end_no_name() {
    let board = Board::new("6.18.0", "a=1\r\nuser_overlays=fan *\r\n");
    assert_eq!(board.install(&[]).0, Some(0));
    assert_eq!(board.env(), "a=1\r\nuser_overlays=fan * kvbroker-rk3588\n");
    let board = Board::new("6.18.0", "extraargs=cma=64M\r\n");
    let (code, said) = board.install(&[]);
    assert_eq!(code, Some(1), "{said}");
    assert!(!said.contains('\r'), "{said:?}");
}
