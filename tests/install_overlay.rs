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
            std::fs::write(path, name).unwrap();
        }
        board
    }

    fn at(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    /// Exit status and what was said.
    fn install(&self, more: &[&str]) -> (Option<i32>, String) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/install-overlay");
        let output =
            Command::new("sh").arg(script).arg("--root").arg(self.dir.path()).args(more).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(said).unwrap())
    }

    fn env(&self) -> String {
        std::fs::read_to_string(self.at("boot/armbianEnv.txt")).unwrap()
    }

    fn installed(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.at("boot/overlay-user")).into_iter().flatten();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

#[test]
fn an_older_kernel_gets_the_variant_that_makes_the_region_the_default_one() {
    let board = Board::new("6.18.2-current-rockchip64", "verbosity=1\nextraargs=quiet");
    let (code, said) = board.install(&[]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(board.env(), "verbosity=1\nextraargs=quiet\nuser_overlays=kvbroker-rk3588\n");
    assert_eq!(board.installed(), ["kvbroker-rk3588.dtbo"]);
    let text = std::fs::read_to_string(board.at("boot/overlay-user/kvbroker-rk3588.dtbo")).unwrap();
    assert_eq!(text, "kvbroker-rk3588");
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
