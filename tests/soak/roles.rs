//! An engine of the shop floor: a process that serves requests, one after the other, from a seed.
//!
//! Owns what it expects of each row. Invariant: every row that is read, its own or one that another process wrote, holds
//! what its writer put there: whose it is and which token it is for.

use std::io::{BufRead, Write};
use std::time::Duration;

use kvbroker::client::{Client, ClientOptions, ClientProfile, Error, OpenOptions, Session, WindowPlace};
use kvbroker::map::SharedMap;
use kvbroker::profile::Kv;
use kvbroker::window::What;
use kvbroker::wire::Fault;

use crate::random::Random;
use crate::support::{EXTENT, PER_BLOCK, ROLE, ROW, profile};

/// Tokens of a system prompt: eight blocks, and a few tokens that are no whole block.
const PROMPT: usize = 8 * PER_BLOCK + 5;
const PROMPTS: u64 = 3;
/// Tokens of the longest answer.
const ANSWER: usize = 24 * PER_BLOCK;
/// The planes that carry a canary: the first and the last of a block.
const PLANES: [(usize, Kv); 2] = [(0, Kv::K), (1, Kv::V)];

/// What an engine has done since it was asked last.
#[derive(Debug, Default, Clone, Copy)]
pub struct Account {
    /// Blocks that its sessions were granted.
    pub grants: u64,
    /// Rows read and found right.
    pub rows: u64,
    /// Requests served to their end.
    pub requests: u64,
    /// Requests that ended early because the pool was full: said so before anything was written.
    pub refused: u64,
    /// Blocks of prompts found.
    pub found: u64,
    /// Sessions forked.
    pub forks: u64,
    /// Windows made.
    pub windows: u64,
    /// Windows refused: no way that the device has leads to such a range.
    pub no_windows: u64,
}

impl Account {
    const NAMES: [&str; 8] =
        ["grants", "rows", "requests", "refused", "found", "forks", "windows", "no_windows"];

    fn fields(&mut self) -> [&mut u64; 8] {
        let Account { grants, rows, requests, refused, found, forks, windows, no_windows } = self;
        [grants, rows, requests, refused, found, forks, windows, no_windows]
    }

    /// Reads what [`Display`](std::fmt::Display) wrote.
    pub fn parse(text: &str) -> Option<Self> {
        let mut account = Account::default();
        let mut words = text.split(' ');
        for (field, name) in account.fields().into_iter().zip(Account::NAMES) {
            *field = words.next()?.strip_prefix(name)?.strip_prefix('=')?.parse().ok()?;
        }
        Some(account)
    }

    pub fn add(&mut self, mut other: Account) {
        self.fields().into_iter().zip(other.fields()).for_each(|(sum, more)| *sum += *more);
    }
}

impl std::fmt::Display for Account {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut copy = *self;
        let pairs = copy.fields().into_iter().zip(Account::NAMES);
        let words: Vec<String> = pairs.map(|(value, name)| format!("{name}={value}")).collect();
        f.write_str(&words.join(" "))
    }
}

/// The bytes of one row: `whose` and `token`, mixed, over and over.
fn canary(whose: u64, token: usize, layer: usize) -> [u8; ROW] {
    let mut mixed = Random::new(whose ^ (token as u64) << 20 ^ (layer as u64) << 60);
    let word = mixed.next().to_le_bytes();
    std::array::from_fn(|i| word[i % 8])
}

/// A session, and whose canary stands in each token.
struct Sequence {
    session: Session,
    whose: Vec<u64>,
}

struct Engine {
    client: Client,
    profile: ClientProfile,
    /// Tells what this process writes from what others do.
    me: u64,
    next: u64,
    account: Account,
}

/// Why a request ended.
enum End {
    /// The pool is full: the request is given up.
    Full,
    /// Something is wrong.
    Broken(String),
}

impl From<Error> for End {
    fn from(e: Error) -> Self {
        match e.fault() {
            Some(Fault::Busy | Fault::OverLimit) => End::Full,
            _ => End::Broken(e.to_string()),
        }
    }
}

type Done = Result<(), End>;

impl Sequence {
    /// Reads a row and compares.
    fn check(&self, token: usize, account: &mut Account) -> Done {
        for (layer, kv) in PLANES {
            let mut row = [0; ROW];
            self.session.read_row(token, layer, kv, &mut row)?;
            let expected = canary(self.whose[token], token, layer);
            if row != expected {
                let text = format!(
                    "session {} token {token} layer {layer}: {:02x?} stands there, {:02x?} was written",
                    self.session.id(),
                    &row[..8],
                    &expected[..8]
                );
                return Err(End::Broken(text));
            }
            account.rows += 1;
        }
        Ok(())
    }

    fn check_all(&self, account: &mut Account) -> Done {
        (self.session.first_token()..self.session.tokens()).try_for_each(|token| self.check(token, account))
    }

    /// Makes room for one token more and writes it.
    fn push(&mut self, whose: u64, account: &mut Account) -> Done {
        let token = self.session.tokens();
        let before = self.session.table().len();
        self.session.ensure(token + 1)?;
        account.grants += (self.session.table().len() - before) as u64;
        self.whose.truncate(token);
        self.whose.push(whose);
        self.write(token)
    }

    fn write(&mut self, token: usize) -> Done {
        for (layer, kv) in PLANES {
            self.session.write_row(token, layer, kv, &canary(self.whose[token], token, layer))?;
        }
        Ok(())
    }

    /// Looks at some blocks through a window, as a device would.
    fn look_through_a_window(&mut self, account: &mut Account) -> Done {
        let (first, end) = (self.session.first_token(), self.session.tokens());
        let last = first + 2 * PER_BLOCK;
        if last > end {
            return Ok(());
        }
        let window = match self.session.window(first..last, What::Blocks, None) {
            Ok(window) => window,
            Err(Error::Refused { .. }) => {
                account.no_windows += 1;
                return Ok(());
            }
            Err(e) => return Err(e.into()),
        };
        account.windows += 1;
        let WindowPlace::Buffer { fd, offset, .. } = window.place() else { return Ok(()) };
        let map = SharedMap::new(fd, EXTENT as usize).map_err(|e| End::Broken(e.to_string()))?;
        for token in first..last {
            let Some(block) = window.block_offset(token) else { continue };
            let at = offset + block + token % PER_BLOCK * ROW;
            let row = map.read(at, ROW);
            if row != canary(self.whose[token], token, 0) {
                return Err(End::Broken(format!("token {token} is another one through the window")));
            }
            account.rows += 1;
        }
        Ok(())
    }
}

impl Engine {
    fn tag(&mut self) -> u64 {
        self.next += 1;
        self.me << 32 | self.next
    }

    /// One request: a system prompt that is shared, a prompt of its own, an answer, and what else engines do.
    fn request(&mut self, random: &mut Random) -> Done {
        let options = OpenOptions { model: "soak".into(), label: "floor".into(), ..OpenOptions::default() };
        let session = self.client.open(&self.profile, options)?;
        let mut main = Sequence { session, whose: Vec::new() };
        let which = random.next() % PROMPTS;
        if random.below(4) > 0 {
            let ids: Vec<u32> = (0..PROMPT as u32).map(|n| n + 1000 * which as u32).collect();
            // Whoever writes a prompt writes the same.
            let whose = u64::MAX - which;
            let held = main.session.attach(&ids)?;
            main.whose = vec![whose; held];
            self.account.found += (held / PER_BLOCK) as u64;
            main.check_all(&mut self.account)?;
            while main.session.tokens() < PROMPT {
                main.push(whose, &mut self.account)?;
            }
            main.session.seal(&ids)?;
        }
        let mine = self.tag();
        let answer = PER_BLOCK + random.below(ANSWER);
        for n in 0..answer {
            main.push(mine, &mut self.account)?;
            match random.below(256) {
                0 => {
                    // A second answer from here on.
                    let theirs = self.tag();
                    let mut twin = Sequence { session: main.session.fork()?, whose: main.whose.clone() };
                    self.account.forks += 1;
                    for _ in 0..20 {
                        twin.push(theirs, &mut self.account)?;
                        main.push(mine, &mut self.account)?;
                    }
                    twin.check_all(&mut self.account)?;
                }
                1 => {
                    // Tokens that were guessed and are taken back.
                    let keep = main.session.tokens().saturating_sub((n + 1).min(24));
                    main.session.trim(keep.max(main.session.first_token()))?;
                    main.whose.truncate(main.session.tokens());
                }
                2 => main.look_through_a_window(&mut self.account)?,
                3 if n > 4 * PER_BLOCK => {
                    // A sliding window of four blocks.
                    main.session.trim_head(main.session.tokens().saturating_sub(4 * PER_BLOCK))?;
                }
                _ => {
                    let first = main.session.first_token();
                    let token = first + random.below(main.session.tokens() - first);
                    main.check(token, &mut self.account)?;
                }
            }
        }
        main.check_all(&mut self.account)?;
        self.account.requests += 1;
        Ok(())
    }

    /// Serves requests until so many blocks have been granted.
    fn work(&mut self, grants: u64, random: &mut Random) -> String {
        self.account = Account::default();
        let mut in_vain = 0;
        while self.account.grants < grants {
            let before = self.account.grants;
            match self.request(random) {
                Ok(()) => {}
                Err(End::Full) => {
                    self.account.refused += 1;
                    // Others hold what is missing: they get time to finish.
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(End::Broken(text)) => return format!("broken: {text}"),
            }
            in_vain = if self.account.grants == before { in_vain + 1 } else { 0 };
            if in_vain == 5000 {
                return "broken: no block in 5000 requests".into();
            }
        }
        self.account.to_string()
    }
}

/// Not a test of its own: without a role, nothing is to be done; with one, this process is an engine until its orders
/// end.
#[test]
fn a_client_process_does_what_it_is_told() {
    let Some(socket) = std::env::var_os(ROLE) else { return };
    let options = ClientOptions { timeout: Duration::from_secs(60), ..ClientOptions::default() };
    let client = Client::connect_to(socket.as_ref(), options).unwrap();
    let profile = client.profile(&profile()).unwrap();
    let me = u64::from(std::process::id());
    let mut engine = Engine { client, profile, me, next: 0, account: Account::default() };
    let say = |text: &str| {
        println!("> {text}");
        std::io::stdout().flush().unwrap();
    };
    say("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["work", grants, seed] => {
                let mut random = Random::new(seed.parse().unwrap());
                say(&engine.work(grants.parse().unwrap(), &mut random));
            }
            _ => panic!("no order {line}"),
        }
    }
    std::process::exit(0);
}
