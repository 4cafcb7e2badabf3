//! Configurations as operators write them, and what is said of wrong ones.

use super::*;

fn read(text: &str) -> Result<Config, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kvbroker.toml");
    std::fs::write(&path, text).unwrap();
    Config::read(&path, true, &Overrides::default())
        .map_err(|e| e.to_string().replace(&dir.path().display().to_string(), ""))
}

#[test]
fn an_empty_file_gives_the_documented_defaults() {
    let c = read("").unwrap();
    assert_eq!((c.pool_bytes, c.minimum_bytes), (256 << 20, 128 << 20));
    assert_eq!(c.profiles, [Profile::reference()]);
    assert_eq!(c.socket_mode, 0o660);
    let usual_tenant = TenantPolicy { pinned: 64 << 20, ..TenantPolicy::default() };
    assert_eq!(c.policy(3 << 20, false), Policy { usual_tenant, checksums: true, ..Policy::default() });
}

#[test]
fn reserves_beyond_all_numbers_are_refused_in_words() {
    let tenant = |uid: u32| format!("[[tenant]]\nuid = {uid}\nreserve = \"16777215T\"\n");
    let said = read(&(tenant(1) + &tenant(2))).and_then(|c| c.consistent().map_err(|e| e.to_string()));
    let said = said.unwrap_err();
    assert!(said.contains("extents together, and the pool has 85"), "{said}");
}

#[test]
fn what_an_error_quotes_of_the_file_is_cut_and_harmless() {
    for text in [
        format!("{} = 1", "k".repeat(100_000)),
        format!("[socket]\nmode = \"{}\"", "9".repeat(100_000)),
        format!("[[profile]]\nname = \"{}\"", "n".repeat(100_000)),
        "[[profile]]\nname = \"\\u001b[2J\"\n".into(),
    ] {
        let said = read(&text).unwrap_err();
        assert!(said.len() < 2000 && !said.contains('\u{1b}'), "{said}");
    }
}

#[test]
fn the_shipped_file_is_the_defaults_and_names_every_key() {
    let shipped = include_str!("../../../systemd/kvbroker.toml");
    // The model of the example is no file that is there: without it, the first [[profile]] goes too.
    let given = shipped.lines().map(|l| l.strip_prefix("#: ").unwrap_or(l).to_owned() + "\n");
    let given = given.filter(|l| !l.contains("config.json")).collect::<String>();
    let given = given.replacen("[[profile]]\nkv-type = \"f16\"\ntokens-per-block = 16\n", "", 1);
    let c = read(&given).unwrap();
    assert_eq!(c.pool_bytes, 256 << 20);
    let keys = [
        "size",
        "minimum",
        "backend",
        "device",
        "heap",
        "heap-directory",
        "extent",
        "cma-alignment-order",
        "lock",
        "elastic",
        "floor",
        "path",
        "mode",
        "group",
        "admin-path",
        "connections",
        "connections-per-tenant",
        "sessions-per-connection",
        "profiles-per-connection",
        "windows-per-session",
        "windows-per-tenant",
        "windows",
        "tenant",
        "uid",
        "limit",
        "connection",
        "pinned",
        "reclaim-ms",
        "reserve",
        "priority",
        "eviction",
        "directory",
        "tenants",
        "labels",
        "common-limit",
        "tenant-limit",
        "label",
        "model",
        "name",
        "layers",
        "kv-heads",
        "head-dim",
        "kv-type",
        "tokens-per-block",
        "scrub",
        "node",
        "address-bits",
        "coherent",
        "iommu",
        "udmabuf",
        "staging",
        "staging-total",
        "staging-heap",
    ];
    for key in keys {
        let stands = |l: &str| l.trim_start_matches("#: ").starts_with(&format!("{key} = "));
        assert!(shipped.lines().any(stands), "{key} is not documented");
    }
    assert!(read(shipped).is_ok());
}

#[test]
fn mistakes_are_named_with_file_line_and_the_nearest_key() {
    let e = read("[pool]\nsizes = \"1M\"\n").unwrap_err();
    assert!(e.contains("/kvbroker.toml: line 2: unknown field `sizes`"), "{e}");
    assert!(e.ends_with("did you mean `size`?"), "{e}");
    assert!(read("[pool]\nsize = \"256\"\n").unwrap_err().contains("without unit"));
    assert!(read("[pool]\nsize = 256\n").unwrap_err().contains("line 2"));
    assert!(read("[pool]\nbackend = \"vram\"\n").unwrap_err().contains("vram"));
    assert!(read("[pool]\ndevice = \"vfio\"\n").unwrap_err().contains("needs device.node"));
    let incoherent =
        "[pool]\ndevice = \"vfio\"\n[device]\nnode = \"/dev/vfio/devices/vfio0\"\ncoherent = false\n";
    assert!(read(incoherent).unwrap_err().contains("VFIO binds coherent devices only"));
    assert!(read("[device]\naddress-bits = 8\n").unwrap_err().contains("20 to 64"));
    assert!(read("[device]\nstaging = \"9M\"\n").unwrap_err().contains("more than device.staging-total"));
    assert!(read("[socket]\nmode = \"rw\"\n").unwrap_err().contains("octal"));
    assert!(read("[[profile]]\nlayers = 2\n").unwrap_err().contains("kv-heads is missing"));
    assert!(
        read("[pool]\nsize = \"1M\"\nminimum = \"2M\"\n")
            .unwrap_err()
            .contains("more than the pool of 1 MiB")
    );
    let twice = "[[tenant]]\nuid = 1\nlimit = \"1M\"\n[[tenant]]\nuid = 1\nlimit = \"2M\"\n";
    assert!(read(twice).unwrap_err().contains("uid = 1 stands there twice"));
}

#[test]
fn drop_ins_win_key_by_key_in_the_order_of_their_names() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kvbroker.toml");
    let drop_in = dir.path().join("kvbroker.toml.d");
    std::fs::create_dir(&drop_in).unwrap();
    std::fs::write(&path, "[pool]\nsize = \"64M\"\nlock = false\n").unwrap();
    std::fs::write(drop_in.join("20-b.toml"), "[pool]\nsize = \"32M\"\n").unwrap();
    std::fs::write(drop_in.join("10-a.toml"), "[pool]\nsize = \"16M\"\n").unwrap();
    std::fs::write(drop_in.join("30-c.conf"), "nonsense").unwrap();
    let read = |over: &Overrides| Config::read(&path, true, over);
    let c = read(&Overrides::default()).unwrap();
    assert_eq!((c.pool_bytes, c.lock), (32 << 20, false));
    let over = Overrides { pool: Some(Size::from_bytes(8 << 20)), ..Overrides::default() };
    assert_eq!(read(&over).unwrap().pool_bytes, 8 << 20);
    std::fs::write(drop_in.join("40-d.toml"), "[pol]\n").unwrap();
    assert!(read(&Overrides::default()).unwrap_err().to_string().contains("40-d.toml"));
}

#[test]
fn what_is_no_file_of_a_configurations_size_or_nested_without_end_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kvbroker.toml");
    let drop_in = dir.path().join("kvbroker.toml.d");
    std::fs::create_dir(&drop_in).unwrap();
    let read = || Config::read(&path, true, &Overrides::default()).unwrap_err().to_string();
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(read().ends_with("kvbroker.toml: this is no regular file"), "{}", read());
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, vec![b'#'; (1 << 20) + 1]).unwrap();
    assert!(read().contains("the file has 1048577 bytes, more than"), "{}", read());
    for deep in [format!("a = {}", "[".repeat(200_000)), format!("[{}a]", "a.".repeat(200_000))] {
        std::fs::write(&path, deep).unwrap();
        let said = read();
        assert!(said.contains("kvbroker.toml: line 1"), "{}", &said[..said.len().min(200)]);
    }
    std::fs::write(&path, [0xff, 0xfe]).unwrap();
    assert!(read().contains("UTF-8"), "{}", read());
    std::fs::write(&path, "").unwrap();
    std::fs::create_dir(drop_in.join("10-a.toml")).unwrap();
    assert!(read().ends_with("10-a.toml: this is no regular file"), "{}", read());
}

#[test]
fn tenants_of_several_files_stand_beside_each_other_and_profiles_are_those_of_the_last_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kvbroker.toml");
    let drop_in = dir.path().join("kvbroker.toml.d");
    std::fs::create_dir(&drop_in).unwrap();
    let profile = |layers: u32| format!("[[profile]]\nlayers = {layers}\nkv-heads = 2\nhead-dim = 64\n");
    let first = "[[tenant]]\nuid = 7\nreserve = \"6M\"\nlimit = \"60M\"\n";
    std::fs::write(&path, format!("{first}{}", profile(8))).unwrap();
    let second = "[[tenant]]\nuid = 8\nreserve = \"9M\"\n[[tenant]]\nuid = 7\nlimit = \"30M\"\n";
    std::fs::write(drop_in.join("10-a.toml"), format!("{second}{}", profile(4))).unwrap();
    std::fs::write(drop_in.join("20-b.toml"), "[[tenant]]\nuid = 9\npriority = 5\n").unwrap();
    let read = || Config::read(&path, true, &Overrides::default()).map_err(|e| e.to_string());
    let config = read().unwrap();
    let policy = config.policy(3 << 20, false);
    let of = |uid: u32| policy.tenants[&Tenant(uid)];
    assert_eq!((of(7).reserve, of(7).limit), (2, Some(10)));
    assert_eq!((of(8).reserve, of(8).limit), (3, None));
    assert_eq!(of(9).priority, 5);
    assert_eq!(config.profiles.len(), 1);
    assert_eq!(config.profiles[0].groups()[0].layers.len(), 4);
    // Twice in one file is a mistake, also where an earlier file has it.
    std::fs::write(drop_in.join("20-b.toml"), "[[tenant]]\nuid = 7\n[[tenant]]\nuid = 7\n").unwrap();
    assert!(read().unwrap_err().contains("uid = 7 stands there twice"));
}

#[test]
fn a_value_that_no_start_could_serve_is_refused_with_its_file_key_and_value() {
    let refused = |text: &str| {
        let e = read(text).and_then(|c| c.consistent().map_err(|e| e.to_string())).unwrap_err();
        e[e.rfind("kvbroker.toml").unwrap_or_else(|| panic!("the file is not named: {e}"))..].to_owned()
    };
    let contiguous = "[pool]\ndevice = \"contiguous\"\nbackend = \"memfd\"\n";
    let long = format!("[socket]\npath = \"/{}\"\n", "s".repeat(107));
    for (text, words) in [
        ("[pool]\ncma-alignment-order = 99\n", "pool.cma-alignment-order = 99: the kernel's"),
        ("[pool]\nsize = \"64K\"\n", "pool.size = 64K: a pool of 64 KiB holds no extent of 384 KiB"),
        ("[pool]\nextent = \"100B\"\n", "pool.extent = 100B: an extent of 100B is not a whole number"),
        ("[pool]\nextent = \"64K\"\n", "pool.extent = 64K: a block of 384 KiB never fits"),
        (
            "[pool]\nminimum = \"256M\"\n",
            "pool.minimum = 256M: after packing, the pool is 85 extents, 255 MiB",
        ),
        (contiguous, "pool.backend = memfd: the pages of a memfd are scattered"),
        (
            "[pool]\ndevice = \"contiguous\"\nbackend = \"udmabuf\"\n",
            "pool.backend = udmabuf: the pages of a memfd are scattered",
        ),
        ("[pool]\nfloor = \"257M\"\n", "pool.floor = 257M: that is more than the pool of 256 MiB"),
        ("[pool]\nheap = \"\"\n", "pool.heap = \"\": an empty path"),
        ("[socket]\npath = \"\"\n", "socket.path = \"\": an empty path"),
        (&long, "108 bytes are too long"),
        ("[socket]\nadmin-path = \"/run/kvbroker/kvbroker.sock\"\n", "a socket each"),
        ("[socket]\nmode = \"999\"\n", "socket.mode = 999: write it in octal"),
        ("[limits]\nconnections = 0\n", "limits.connections = 0: nobody could use"),
        ("[limits]\nhello-ms = 0\n", "limits.hello-ms = 0: nobody is quick enough"),
        ("[limits]\nsessions-per-connection = 0\n", "limits.sessions-per-connection = 0"),
        ("[limits]\ntenant = \"2M\"\n", "limits.tenant = 2M: a tenant owns whole extents, and one is 3M"),
        ("[[tenant]]\nuid = 7\nlimit = \"0B\"\n", "tenant = uid 7, limit 0B"),
        ("[[tenant]]\nuid = 4294967295\n", "no user can have this uid"),
        ("[[tenant]]\nuid = 65534\nreserve = \"1M\"\n", "users that this namespace does not know"),
        ("[limits]\nconnections = 4294967295\n", "limits.connections = 4294967295: no machine has room"),
        ("[limits]\ntable-blocks = 9223372036854775807\n", "limits.table-blocks = 9223372036854775807: no"),
        ("[pool]\nextent = \"0B\"\n", "pool.extent = 0B: an extent of 0B is not a whole number"),
        // A reserve is whole extents of 3 MiB, a limit as well: one rounds up, the other down.
        (
            "[[tenant]]\nuid = 7\nreserve = \"200M\"\n[[tenant]]\nuid = 8\nreserve = \"55M\"\n",
            "tenant = 258M: the reserves are 86 extents together, and the pool has 85",
        ),
        (
            "[[tenant]]\nuid = 7\nreserve = \"8388608T\"\n[[tenant]]\nuid = 8\nreserve = \"8388608T\"\n",
            "the reserves are",
        ),
        (
            "[[tenant]]\nuid = 7\nreserve = \"4M\"\nlimit = \"5M\"\n",
            "tenant = uid 7, reserve 4M, limit 5M: that is 2 extents of 3 MiB reserved, and 1 allowed",
        ),
        (
            "[limits]\ntenant = \"3M\"\n[[tenant]]\nuid = 7\nreserve = \"6M\"\n",
            "tenant = uid 7, reserve 6M, limit 3M",
        ),
        ("[[profile]]\nmodel = \"/nowhere/config.json\"\n", "[[profile]] model: "),
    ] {
        let said = refused(text);
        assert!(said.contains(words), "{text}: {said}");
    }
    assert!(read("[pool]\nsize = \"9M\"\n").unwrap().consistent().is_ok());
}

#[test]
fn wrong_types_and_keys_that_stand_there_twice_are_named_with_their_line() {
    let said = read("[pool]\nlock = \"yes\"\n").unwrap_err();
    assert!(said.contains("line 2") && said.contains("expected a boolean"), "{said}");
    let said = read("[pool]\nsize = \"1M\"\nsize = \"2M\"\n").unwrap_err();
    assert!(said.contains("line 3") && said.contains("duplicate key"), "{said}");
    let said = read("[limits]\nconnections = -1\n").unwrap_err();
    assert!(said.contains("line 2"), "{said}");
    let said = read("[poll]\n").unwrap_err();
    assert!(said.ends_with("did you mean `pool`?"), "{said}");
}

#[test]
fn a_wrong_value_is_laid_at_the_drop_in_that_set_it_or_at_the_command_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kvbroker.toml");
    let drop_in = dir.path().join("kvbroker.toml.d");
    std::fs::create_dir(&drop_in).unwrap();
    std::fs::write(&path, "[pool]\nsize = \"64M\"\n").unwrap();
    std::fs::write(drop_in.join("10-small.toml"), "[pool]\nsize = \"64K\"\n").unwrap();
    let said =
        |over: &Overrides| Config::read(&path, true, over).unwrap().consistent().unwrap_err().to_string();
    assert!(said(&Overrides::default()).contains("kvbroker.toml.d/10-small.toml: pool.size = 64K"));
    let over = Overrides { pool: Some(Size::from_bytes(4096)), ..Overrides::default() };
    assert!(said(&over).starts_with("command line or defaults: pool.size = 4K"));
}

#[test]
fn limits_of_tenants_are_whole_extents() {
    let c = read("[limits]\ntenant = \"10M\"\n[[tenant]]\nuid = 7\nlimit = \"96M\"\n").unwrap();
    let policy = c.policy(3 << 20, false);
    assert_eq!(policy.usual_tenant.limit, Some(3));
    assert_eq!(policy.tenants[&Tenant(7)].limit, Some(32));
}

#[test]
fn the_floor_of_an_elastic_pool_is_the_minimum_unless_it_is_said() {
    let floor = |text: &str| read(text).unwrap().policy(3 << 20, false).floor_extents;
    assert_eq!(floor("[pool]\nelastic = true\n"), 43);
    assert_eq!(floor("[pool]\nelastic = true\nminimum = \"30M\"\n"), 10);
    assert_eq!(floor("[pool]\nelastic = true\nfloor = \"3M\"\n"), 1);
}
