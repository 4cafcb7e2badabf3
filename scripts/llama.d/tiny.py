"""Models of a few kilobytes with random weights, as GGUF files, for what the real ones do not show: a recurrent model
(Mamba), whose state is no attention KV cache, and a Llama whose planes are smaller than a page.

Their words are bytes, and what they say means nothing; it is the same in every run, and that is what is compared.
"""

import random
import struct

U32, F32, STRING, ARRAY = 4, 6, 8, 9
I32 = 5
ALIGNMENT = 32
WORDS = 512


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind, v):
    if kind == STRING:
        return text(v)
    return struct.pack({U32: "<I", I32: "<i", F32: "<f"}[kind], v)


def entry(key, kind, v, of=None):
    out = text(key) + struct.pack("<I", kind)
    if kind == ARRAY:
        return out + struct.pack("<IQ", of, len(v)) + b"".join(value(of, x) for x in v)
    return out + value(kind, v)


def write(path, arch, numbers, floats, tensors):
    """A GGUF file, version 3, whose tensors (name, dimensions from the innermost on, spread or constant) are f32."""
    words = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [2, 3, 3] + [6] * 256
    # Words that no text has, up to a number that every token of our programs is below.
    words += [f"<unused{i}>" for i in range(len(words), WORDS)]
    kinds += [5] * (WORDS - len(kinds))
    pairs = [
        entry("general.architecture", STRING, arch),
        entry("general.name", STRING, f"tiny {arch}"),
        entry("tokenizer.ggml.model", STRING, "llama"),
        entry("tokenizer.ggml.tokens", ARRAY, words, STRING),
        entry("tokenizer.ggml.scores", ARRAY, [0.0] * len(words), F32),
        entry("tokenizer.ggml.token_type", ARRAY, kinds, I32),
        entry("tokenizer.ggml.bos_token_id", U32, 1),
        entry("tokenizer.ggml.eos_token_id", U32, 2),
    ]
    pairs += [entry(f"{arch}.{key}", U32, v) for key, v in numbers.items()]
    pairs += [entry(f"{arch}.{key}", F32, v) for key, v in floats.items()]
    source = random.Random(7)
    head, data = b"", b""
    for name, dimensions, spread, constant in tensors:
        count = 1
        for d in dimensions:
            count *= d
        head += text(name) + struct.pack("<I", len(dimensions)) + struct.pack(f"<{len(dimensions)}Q", *dimensions)
        head += struct.pack("<IQ", 0, len(data))
        numbers_ = [constant + (source.gauss(0, spread) if spread else 0) for _ in range(count)]
        data += struct.pack(f"<{count}f", *numbers_)
        data += b"\0" * (-len(data) % ALIGNMENT)
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs) + head
    out += b"\0" * (-len(out) % ALIGNMENT)
    path.write_bytes(out + data)


def llama(path, head_dim, layers=2, heads=4, kv_heads=1, vocabulary=WORDS):
    width, feed = heads * head_dim, 4 * heads * head_dim
    tensors = [("token_embd.weight", (width, vocabulary), 1, 0), ("output_norm.weight", (width,), 0, 1),
               ("output.weight", (width, vocabulary), 1, 0)]
    for i in range(layers):
        tensors += [
            (f"blk.{i}.attn_norm.weight", (width,), 0, 1),
            (f"blk.{i}.attn_q.weight", (width, width), 0.5, 0),
            (f"blk.{i}.attn_k.weight", (width, kv_heads * head_dim), 0.5, 0),
            (f"blk.{i}.attn_v.weight", (width, kv_heads * head_dim), 0.5, 0),
            (f"blk.{i}.attn_output.weight", (width, width), 0.5, 0),
            (f"blk.{i}.ffn_norm.weight", (width,), 0, 1),
            (f"blk.{i}.ffn_gate.weight", (width, feed), 0.5, 0),
            (f"blk.{i}.ffn_up.weight", (width, feed), 0.5, 0),
            (f"blk.{i}.ffn_down.weight", (feed, width), 0.5, 0),
        ]
    write(path, "llama", {
        "context_length": 4096, "embedding_length": width, "block_count": layers, "feed_forward_length": feed,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads, "rope.dimension_count": head_dim,
        "vocab_size": vocabulary,
    }, {"attention.layer_norm_rms_epsilon": 1e-5}, tensors)


def mamba(path, layers=2, width=64, vocabulary=WORDS):
    inner, state, rank, kernel = 2 * width, 16, 4, 4
    tensors = [("token_embd.weight", (width, vocabulary), 1, 0), ("output_norm.weight", (width,), 0, 1)]
    for i in range(layers):
        tensors += [
            (f"blk.{i}.attn_norm.weight", (width,), 0, 1),
            (f"blk.{i}.ssm_in.weight", (width, 2 * inner), 0.3, 0),
            (f"blk.{i}.ssm_conv1d.weight", (kernel, inner), 0.5, 0),
            (f"blk.{i}.ssm_conv1d.bias", (inner,), 0, 0),
            (f"blk.{i}.ssm_x.weight", (inner, rank + 2 * state), 0.3, 0),
            (f"blk.{i}.ssm_dt.weight", (rank, inner), 0.3, 0),
            (f"blk.{i}.ssm_dt.bias", (inner,), 0, 0.1),
            (f"blk.{i}.ssm_a", (state, inner), 0, -1),
            (f"blk.{i}.ssm_d", (inner,), 0, 1),
            (f"blk.{i}.ssm_out.weight", (inner, width), 0.3, 0),
        ]
    write(path, "mamba", {
        "context_length": 4096, "embedding_length": width, "block_count": layers, "feed_forward_length": 0,
        "attention.head_count": 0, "ssm.conv_kernel": kernel, "ssm.inner_size": inner, "ssm.state_size": state,
        "ssm.time_step_rank": rank, "vocab_size": vocabulary,
    }, {"attention.layer_norm_rms_epsilon": 1e-5}, tensors)
