//! `kvbctl plan` as its users run it: the real binary over model files, good and bad.
#![cfg(feature = "daemon")]

#[path = "common/gguf.rs"]
#[allow(dead_code)] // each test crate uses its part of the writer
mod writer;

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use writer::Header;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn config(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(format!("{name}.json"))
}

fn kvbctl(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvbctl")).args(args).output().expect("the binary runs")
}

/// Runs `plan` on a file; pages of 4 KiB, as on the boards that the figures are stated for.
fn run(path: &Path, args: &[&str]) -> Output {
    let path = path.to_str().expect("a path in UTF-8");
    kvbctl(&[&["plan", "--page-size", "4K", "--config", path], args].concat())
}

fn json_of(path: &Path, args: &[&str]) -> Value {
    let out = run(path, &[&["--json"], args].concat());
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).expect("JSON on standard output")
}

fn json(name: &str, args: &[&str]) -> Value {
    json_of(&config(name), args)
}

fn text(name: &str, args: &[&str]) -> String {
    let out = run(&config(name), args);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).expect("text")
}

/// What a refused request says; the exit code is 1, and standard output stays empty.
fn refused(out: &Output) -> String {
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(out.stdout.is_empty() && said.starts_with("kvbctl: ") && said.lines().count() == 1, "{said}");
    said
}

/// What `plan` says of a file with these bytes.
fn refused_file(name: &str, bytes: &[u8]) -> String {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join(name);
    fs::write(&path, bytes).expect("a file");
    let said = refused(&run(&path, &[]));
    assert!(said.contains(name), "the file is named: {said}");
    said
}

fn number(value: &Value, field: &str) -> u64 {
    value[field].as_u64().unwrap_or_else(|| panic!("{field} in {value}"))
}

/// Two decimals, as the table of models has them.
fn kib(bytes: u64) -> f64 {
    (bytes as f64 / 1024.0 * 100.0).round() / 100.0
}

#[test]
fn each_model_of_the_table_has_its_bytes_blocks_and_tokens() {
    // name; KiB per token f16, int8, q8_0, q4_0; KiB of 16 tokens f16 and of 32 int8; blocks and tokens in 256 MiB
    type Row = (&'static str, [f64; 4], u64, u64, u64, u64);
    const TABLE: [Row; 14] = [
        ("qwen2.5-0.5b", [12.0, 6.0, 6.38, 3.38], 192, 1365, 21_845, 43_690),
        ("qwen2.5-1.5b", [28.0, 14.0, 14.88, 7.88], 448, 585, 9_362, 18_724),
        ("qwen2.5-3b", [36.0, 18.0, 19.13, 10.13], 576, 455, 7_281, 14_563),
        ("qwen1.5-1.8b", [192.0, 96.0, 102.0, 54.0], 3072, 85, 1_365, 2_730),
        ("qwen3-0.6b", [112.0, 56.0, 59.5, 31.5], 1792, 146, 2_340, 4_681),
        ("qwen3-1.7b", [112.0, 56.0, 59.5, 31.5], 1792, 146, 2_340, 4_681),
        ("llama-3.2-1b", [32.0, 16.0, 17.0, 9.0], 512, 512, 8_192, 16_384),
        ("llama-3.2-3b", [112.0, 56.0, 59.5, 31.5], 1792, 146, 2_340, 4_681),
        ("tinyllama-1.1b", [22.0, 11.0, 11.69, 6.19], 352, 744, 11_915, 23_831),
        ("smollm2-135m", [22.5, 11.25, 11.95, 6.33], 360, 728, 11_650, 23_301),
        ("smollm2-360m", [40.0, 20.0, 21.25, 11.25], 640, 409, 6_553, 13_107),
        ("smollm2-1.7b", [192.0, 96.0, 102.0, 54.0], 3072, 85, 1_365, 2_730),
        ("smollm3-3b", [72.0, 36.0, 38.25, 20.25], 1152, 227, 3_640, 7_281),
        ("gemma-3-1b", [26.0, 13.0, 13.81, 7.31], 416, 630, 10_082, 20_164),
    ];
    for (name, per_token, block, blocks, tokens, tokens_int8) in TABLE {
        for (kv, expected) in ["f16", "int8", "q8_0", "q4_0"].into_iter().zip(per_token) {
            let plan = json(name, &["--kv-type", kv]);
            assert_eq!(kib(number(&plan, "bytes_per_token")), expected, "{name} {kv}");
        }
        let f16 = json(name, &[]);
        assert_eq!(number(&f16, "bytes_per_block"), block * KIB, "{name}");
        assert_eq!(number(&f16, "blocks_ideal"), blocks, "{name}");
        assert_eq!(number(&f16, "pool_bytes") / number(&f16, "bytes_per_token"), tokens, "{name}");
        let int8 = json(name, &["--kv-type", "int8", "--tokens-per-block", "32"]);
        assert_eq!(number(&int8, "bytes_per_block"), block * KIB, "{name}");
        assert_eq!(number(&int8, "tokens_per_block"), 32, "{name}");
        assert_eq!(256 * MIB / number(&int8, "bytes_per_token"), tokens_int8, "{name}");
    }
}

#[test]
fn pools_pack_into_the_blocks_that_the_design_states() {
    // file, further arguments; bytes of an extent in KiB, blocks in each, extents, blocks
    type Row = (&'static str, &'static [&'static str], u64, u64, u64, u64);
    const TABLE: [Row; 8] = [
        ("reference", &[], 3072, 8, 85, 680),
        ("qwen2.5-0.5b", &[], 3072, 16, 85, 1360),
        ("qwen2.5-1.5b", &[], 4032, 9, 64, 576),
        ("qwen3-0.6b", &[], 7168, 4, 36, 144),
        // Blocks of 64 KiB: 4 tokens of 16 KiB.
        ("llama-3.2-1b", &["--kv-type", "int8", "--tokens-per-block", "4"], 1024, 16, 256, 4096),
        ("reference", &["--pool", "192M"], 3072, 8, 64, 512),
        ("reference", &["--extent", "block"], 384, 1, 512, 512),
        ("reference", &["--extent", "block", "--backend", "memfd"], 384, 1, 682, 682),
    ];
    for (name, args, extent, each, extents, blocks) in TABLE {
        let plan = json(name, args);
        assert_eq!(number(&plan, "extent_bytes"), extent * KIB, "{name} {args:?}");
        assert_eq!(number(&plan, "blocks_per_extent"), each, "{name} {args:?}");
        assert_eq!(number(&plan, "extents"), extents, "{name} {args:?}");
        assert_eq!(number(&plan, "blocks"), blocks, "{name} {args:?}");
        let used = blocks * number(&plan, "bytes_per_block");
        assert_eq!(number(&plan, "waste_bytes"), number(&plan, "pool_bytes") - used, "{name} {args:?}");
    }
}

#[test]
fn the_reference_model_needs_12_mib_for_512_tokens_and_48_for_2048() {
    let plan = json("reference", &[]);
    assert_eq!(number(&plan, "bytes_at_512"), 12 * MIB);
    assert_eq!(number(&plan, "bytes_at_2048"), 48 * MIB);
    assert_eq!(number(&plan, "blocks_ideal"), 682);
    let said = text("reference", &[]);
    for part in
        ["12 MiB", "48 MiB", "682 blocks", "680 blocks", "85 extents of 3 MiB", "512 KiB boundary", "65530"]
    {
        assert!(said.contains(part), "{part} in:\n{said}");
    }
}

#[test]
fn seven_sessions_of_4096_tokens_reserve_672_mib_and_page_far_less() {
    let args = ["--sessions", "7", "--context", "4096"];
    let plan = json("reference", &args);
    assert_eq!(number(&plan, "static_bytes"), 672 * MIB);
    assert_eq!(number(&plan, "paged_bytes"), 168 * MIB, "1024 tokens live in each");
    let live = json("reference", &[&args[..], &["--live", "1170"]].concat());
    // The 192 MiB that the project promises in place of 680 MB: 1170 tokens a session, rounded up to blocks.
    assert_eq!(number(&live, "paged_bytes"), 7 * 74 * 384 * KIB);
}

#[test]
fn gemma_3_has_two_groups_and_27_mib_at_4096_tokens() {
    for name in ["gemma-3-1b", "gemma-3-1b-layer-types"] {
        let plan = json(name, &["--context", "4096"]);
        assert_eq!(number(&plan, "bytes_at_context"), 27 * MIB, "{name}");
        let groups = plan["groups"].as_array().expect("groups");
        assert_eq!(groups.len(), 2);
        assert_eq!(groups[0]["window"], Value::Null);
        assert_eq!(groups[0]["layer_numbers"], serde_json::json!([5, 11, 17, 23]));
        assert_eq!((number(&groups[1], "layers"), number(&groups[1], "window")), (22, 512));
        let sum = groups.iter().map(|g| number(g, "bytes_per_token")).sum::<u64>();
        assert_eq!((number(&groups[0], "bytes_per_token"), sum), (4 * KIB, number(&plan, "bytes_per_token")));
        assert_eq!(plan["blocks_per_extent"], Value::Null, "each group has its own");
        // 256 blocks of 64 KiB, and the window of 512 tokens in 33 blocks of 352 KiB when it begins within one.
        let held: Vec<_> = groups.iter().map(|g| number(g, "blocks_at_context")).collect();
        assert_eq!(held, [256, 33]);
        assert_eq!(number(&plan, "held_bytes_at_context"), 256 * 64 * KIB + 33 * 352 * KIB);
        assert_eq!(number(&plan, "bytes_at_context_without_windows"), 104 * MIB);
        // Extents of 126 or of 23 blocks: 3 and 2 of 32 for one session, so 30 are left for tokens beside the window.
        assert_eq!(number(&plan, "longest_session_tokens"), 30 * 126 * 16);
        assert_eq!(number(&plan, "sessions_at_context"), 9);
        let said = text(name, &["--context", "4096"]);
        for part in ["27.34 MiB", "104 MiB if no layer had a window", "9 sessions", "60480 tokens"] {
            assert!(said.contains(part), "{part} in:\n{said}");
        }
    }
    let wide = json("gemma-3-4b", &[]);
    assert_eq!((number(&wide, "kv_heads"), number(&wide, "head_dim")), (4, 256));
    assert!(wide["notes"].to_string().contains("text_config.num_key_value_heads"), "{}", wide["notes"]);
    let two = json("gemma-2-2b", &["--context", "8192"]);
    assert_eq!(number(&two, "bytes_at_context"), (8192 + 4096) * 52 * KIB);
}

#[test]
fn plane_views_come_with_the_tokens_per_block_that_the_design_states() {
    let least = |name, args: &[&str]| json(name, args)["plane_view_tokens_per_block"].as_u64();
    assert_eq!(least("reference", &[]), Some(8));
    assert_eq!(least("qwen2.5-0.5b", &[]), Some(16));
    assert_eq!(least("qwen2.5-0.5b", &["--kv-type", "int8"]), Some(32));
    assert_eq!(least("qwen2.5-0.5b", &["--kv-type", "q8_0"]), Some(512));
    assert_eq!(least("smollm2-135m", &[]), Some(32));
    assert_eq!(least("qwen2.5-1.5b", &[]), Some(8));
    let plan = json("reference", &[]);
    assert_eq!((number(&plan, "vmas_per_session"), number(&plan, "vma_limit")), (48 * 128, 65_530));
}

#[test]
fn a_profile_that_does_not_suit_the_extents_is_warned_about_or_refused() {
    let said = text("qwen3-0.6b", &["--extent", "3M"]);
    assert!(said.contains("Warnings") && said.contains("waste 42 % of the pool"), "{said}");
    assert!(!text("qwen3-0.6b", &[]).contains("Warnings"));
    let said = refused(&run(&config("qwen3-0.6b"), &["--extent", "1M"]));
    assert!(said.contains("never fits") && said.contains("1792K"), "{said}");
}

#[test]
fn two_models_share_a_pool_whose_extents_suit_both() {
    let other = config("qwen3-0.6b");
    let other = other.to_str().expect("a path in UTF-8");
    let plan = json("reference", &["--config", other]);
    let beside = &plan["beside"][0];
    assert_eq!(beside["model"], "qwen3-0.6b");
    assert_eq!(number(&beside["groups"][0], "blocks"), 144);
    assert_eq!(number(&plan, "blocks"), 648, "18 in each of 36 extents of 7 MiB");
    assert_eq!(plan["warnings"], serde_json::json!([]));
}

#[test]
fn the_whole_board_is_accounted_with_ram_base_and_weights() {
    let board = ["--ram", "4G", "--base", "1.8G", "--weights", "1.1G"];
    let plan = json("reference", &[&board[..], &["--sessions", "7", "--context", "4096"]].concat());
    // 4 - 1.8 - 1.1 GiB in bytes, each part rounded down.
    let free = (4 << 30) - 1_932_735_283 - 1_181_116_006i64;
    assert_eq!(plan["board"]["left_static_bytes"].as_i64(), Some(free - (672 << 20)));
    assert_eq!(plan["board"]["left_paged_bytes"].as_i64(), Some(free - (256 << 20)));
    let said = text("reference", &[&board[..], &["--sessions", "14", "--context", "4096"]].concat());
    assert!(said.contains("left, paged") && said.contains("the board is short of"), "{said}");
    assert_eq!(kvbctl(&["plan", "--config", "x", "--ram", "4G"]).status.code(), Some(2), "all three or none");
}

#[test]
fn a_gguf_header_gives_the_same_account_as_the_config() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("model.bin");
    let header = Header::new(3)
        .put("general.architecture", writer::Value::Text("qwen3"))
        .put("general.name", writer::Value::Text("Qwen3 0.6B"))
        .put("qwen3.block_count", writer::Value::U32(28))
        .put("qwen3.embedding_length", writer::Value::U32(1024))
        .put("qwen3.attention.head_count", writer::Value::U32(16))
        .put("qwen3.attention.head_count_kv", writer::Value::U32(8))
        .put("qwen3.attention.key_length", writer::Value::U32(128))
        .put("qwen3.attention.value_length", writer::Value::U32(128));
    fs::write(&path, header.bytes()).expect("a file");
    let (mut gguf, mut hf) = (json_of(&path, &[]), json("qwen3-0.6b", &[]));
    assert_eq!(gguf["model"], "Qwen3 0.6B");
    for plan in [&mut gguf, &mut hf] {
        plan["model"] = Value::Null;
    }
    assert_eq!(gguf, hf);
}

#[test]
fn a_directory_stands_for_the_config_in_it() {
    let dir = tempfile::tempdir().expect("a directory");
    assert!(refused(&run(dir.path(), &[])).contains("holds no config.json"));
    let model = dir.path().join("my-model");
    fs::create_dir(&model).expect("a directory");
    fs::copy(config("reference"), model.join("config.json")).expect("a copy");
    assert_eq!(json_of(&model, &[])["model"], "my-model");
}

#[test]
fn bad_files_are_refused_in_one_line_that_names_what_is_wrong() {
    let said = |text: &str| refused_file("config.json", text.as_bytes());
    assert!(said("").contains("is empty"));
    assert!(said("{").contains("no valid JSON"));
    assert!(said(&"[".repeat(200_000)).contains("no valid JSON"));
    assert!(said(&" ".repeat(2 << 20)).contains("more than the 1048576"));
    assert!(said("{\"model_type\": \"mamba\"}").contains("model_type is \"mamba\""));
    assert!(said("{\"model_type\": \"a\\u001b[31m\\nb\"}").contains("\\u{1b}[31m\\nb"));
    assert!(said("{\"model_type\": \"llama\", \"num_hidden_layers\": NaN}").contains("no valid JSON"));
    let llama = |field: &str| {
        said(&format!(
            "{{\"model_type\": \"llama\", \"num_hidden_layers\": 2, \"num_attention_heads\": 9, \"hidden_size\": 577, {field}}}"
        ))
    };
    assert!(llama("\"num_key_value_heads\": 0").contains("num_key_value_heads is 0"));
    assert!(llama("\"num_key_value_heads\": -3").contains("num_key_value_heads is -3"));
    assert!(llama("\"num_key_value_heads\": \"3\"").contains("num_key_value_heads is \"3\""));
    assert!(llama("\"num_key_value_heads\": 1e99").contains("num_key_value_heads is 1e+99"));
    assert!(llama("\"num_key_value_heads\": 3").contains("hidden_size is 577"));
    let gguf = |bytes: &[u8]| refused_file("model.gguf", bytes);
    assert!(gguf(b"GGUF").contains("ends at byte 4"));
    assert!(gguf(&Header::new(3).claiming(u64::MAX)).contains("pairs"));
    let huge = Header::new(3).put("x", writer::Value::List(8, u64::MAX, vec![]));
    assert!(gguf(&huge.bytes()).contains("cut short"));
}

#[test]
fn what_is_no_file_is_refused_and_never_waited_for() {
    assert!(refused(&run(Path::new("/nonexistent"), &[])).contains("/nonexistent"));
    assert!(refused(&run(Path::new("/dev/zero"), &[])).contains("no regular file"));
    let dir = tempfile::tempdir().expect("a directory");
    let fifo = dir.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
    assert!(refused(&run(&fifo, &[])).contains("no regular file"));
}

#[test]
fn requests_that_cannot_be_met_are_refused_in_words() {
    let said = |args: &[&str]| refused(&run(&config("reference"), args));
    assert!(said(&["--tokens-per-block", "24"]).contains("24 tokens per block"));
    assert!(said(&["--pool", "100K"]).contains("pool of 100 KiB"));
    assert!(said(&["--context", "0"]).contains("0 tokens"));
    assert!(said(&["--context", "4294967295"]).contains("4294967295 tokens"));
    assert!(said(&["--sessions", "0"]).contains("0 sessions"));
    assert!(said(&["--live", "5000"]).contains("5000 live tokens"));
    assert!(said(&["--cma-alignment", "40"]).contains("CONFIG_CMA_ALIGNMENT"));
    let reference = config("reference");
    let reference = reference.to_str().expect("a path in UTF-8");
    let page = refused(&kvbctl(&["plan", "--config", reference, "--page-size", "3K"]));
    assert!(page.contains("pages of 3072 bytes"), "{page}");
    // 5 KV heads of 16 are 80 values, no whole number of blocks of 32.
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("odd.json");
    let odd = "{\"model_type\": \"llama\", \"num_hidden_layers\": 1, \"num_attention_heads\": 5, \"num_key_value_heads\": 5, \"head_dim\": 16}";
    fs::write(&path, odd).expect("a file");
    assert!(refused(&run(&path, &["--kv-type", "q8_0"])).contains("80 values"));
}

#[test]
fn a_wrong_command_line_ends_with_2_and_says_what_to_write() {
    let usage = |args: &[&str]| {
        let out = run(&config("reference"), args);
        assert_eq!(out.status.code(), Some(2), "{args:?}");
        String::from_utf8_lossy(&out.stderr).into_owned()
    };
    assert!(usage(&["--pool", "256"]).contains("a size without unit"));
    assert!(usage(&["--pool", "256MB"]).contains("ambiguous"));
    assert!(usage(&["--kv-type", "fp16"]).contains("use f16"));
    assert!(usage(&["--sessions=-1"]).contains("--sessions"));
    assert!(usage(&["--no-such-option"]).contains("--no-such-option"));
    assert_eq!(kvbctl(&[]).status.code(), Some(2));
    assert_eq!(kvbctl(&["plan"]).status.code(), Some(2));
}

#[test]
fn help_lists_the_exit_codes() {
    for args in [&["--help"][..], &["plan", "--help"]] {
        let out = kvbctl(args);
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        assert!(out.status.success() && said.contains("Exit codes:"), "{said}");
        assert!(said.contains("the broker could not be reached"), "{said}");
    }
}

#[test]
fn a_full_disk_is_an_error_and_a_closed_pipe_is_not() {
    let path = config("reference");
    let plan = |stdout: fs::File| {
        Command::new(env!("CARGO_BIN_EXE_kvbctl"))
            .args(["plan", "--config", path.to_str().expect("a path in UTF-8")])
            .stdout(stdout)
            .output()
            .expect("the binary runs")
    };
    let full = plan(fs::OpenOptions::new().write(true).open("/dev/full").expect("/dev/full"));
    assert_eq!(full.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&full.stderr).contains("cannot write the answer"));
    let (reader, writer) = nix::unistd::pipe().expect("a pipe");
    drop(reader);
    let closed = plan(writer.into());
    assert_eq!(closed.status.code(), Some(0), "{}", String::from_utf8_lossy(&closed.stderr));
}
