//! A daemon of a test's own, at sockets in a directory of its own.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command};

/// A daemon of the test's own; it ends with this.
pub struct Daemon {
    child: Child,
    directory: tempfile::TempDir,
}

impl Daemon {
    /// Starts it over a pool of four extents of 1 MiB, and waits until it can be reached.
    pub fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let config = directory.path().join("kvbroker.toml");
        let at = |name: &str| directory.path().join(name).display().to_string();
        let text = format!(
            "[pool]\nsize = \"4M\"\nextent = \"1M\"\nbackend = \"memfd\"\nlock = false\n[socket]\npath = {:?}\nadmin-path = {:?}\n",
            at("client.sock"),
            at("admin.sock")
        );
        fs::write(&config, text).unwrap();
        let child =
            Command::new(env!("CARGO_BIN_EXE_kvbrokerd")).arg("--config").arg(&config).spawn().unwrap();
        let mut daemon = Daemon { child, directory };
        // The admin socket is a stream, so that it can be tried without the client's protocol.
        while UnixStream::connect(daemon.directory.path().join("admin.sock")).is_err() {
            assert!(daemon.child.try_wait().unwrap().is_none(), "the daemon has ended");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        daemon
    }

    /// Ends it by SIGKILL.
    #[allow(dead_code, reason = "not every test that shares this file kills its daemon")]
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// The socket for clients.
    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("client.sock")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
