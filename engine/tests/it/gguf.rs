//! Files that are cut off, damaged, of another kind or another model: each gives an error that says so, none a crash.

use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use sha2::Digest;
use tandem_engine::model::checkpoint::{Checkpoint, LayerPart, Part};
use tandem_engine::model::config::{Architecture, RopePairs};
use tandem_engine::model::gguf::container::{Gguf, Value};
use tandem_engine::model::{KvBudget, LoadError, LoadOptions, load};

use crate::tiny::{self, Kind, Meta, Random, Shape};

const SHAPE: Shape = Shape {
    layers: 1,
    hidden: 32,
    heads: 2,
    kv_heads: 1,
    head_dim: 16,
    inner: 32,
    vocab: 9,
    ..Shape::SMALL
};

fn small() -> tiny::File {
    tiny::llama(SHAPE, Kind::Q4_1, Kind::Q8_0, 1)
}

fn options(path: &Path) -> LoadOptions {
    LoadOptions {
        threads: 1,
        kv: KvBudget::Pages(4),
        max_length_tokens: Some(64),
        max_step_tokens: 8,
        max_step_seqs: 2,
        ..LoadOptions::new(path)
    }
}

/// The error of loading a file with this change.
fn error(change: impl FnOnce(&mut tiny::File)) -> String {
    let dir = tempfile::tempdir().unwrap();
    let mut file = small();
    change(&mut file);
    let path = file.write(dir.path());
    let error = load(&options(&path), &mut |_| {}).err().expect("an error").to_string();
    assert!(error.contains("tiny.gguf"), "{error}: names no file");
    error
}

#[test]
fn a_whole_file_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = small().write(dir.path());
    let gguf = Gguf::open(&path).unwrap();
    assert_eq!(gguf.metadata()["llama.block_count"], Value::Unsigned(1));
    assert_eq!(gguf.metadata()["tokenizer.ggml.tokens"], Value::Array(9));
    assert_eq!(gguf.tensor("blk.0.ffn_down.weight").unwrap().1.len(), 32 * 20);
    let mut told = Vec::new();
    let model = load(&options(&path), &mut |p| told.push(p)).unwrap();
    assert!(
        told.is_sorted() && told.first() == Some(&0) && told.last() == Some(&100),
        "{told:?}"
    );
    let spec = model.spec();
    assert_eq!((spec.name.as_str(), spec.vocab_size, spec.total_pages), ("tiny", 9, 4));
    assert_eq!(spec.end_tokens, [2]);
    assert_eq!(spec.max_length_tokens, 64);
    // sha256 of the very bytes
    assert_eq!(
        spec.hash,
        <[u8; 32]>::from(sha2::Sha256::digest(std::fs::read(&path).unwrap()))
    );
}

/// The same file with another revision asked for.
fn revised(path: &std::path::Path, revision: &str) -> Option<String> {
    let options = LoadOptions {
        revision: Some(revision.to_owned()),
        ..options(path)
    };
    load(&options, &mut |_| {}).err().map(|error| error.to_string())
}

#[test]
fn other_bytes_than_those_that_are_meant_are_served() {
    let dir = tempfile::tempdir().unwrap();
    let path = small().write(dir.path());
    let hash: [u8; 32] = sha2::Sha256::digest(std::fs::read(&path).unwrap()).into();
    let own = hash
        .iter()
        .fold(String::new(), |text, byte| text + &format!("{byte:02x}"));
    assert_eq!(revised(&path, &own), None);
    let other = "0".repeat(64);
    let error = revised(&path, &other).unwrap();
    for part in [path.to_str().unwrap(), &own, &other] {
        assert!(error.contains(part), "{part} is not in: {error}");
    }
}

#[test]
fn version_2_is_read_and_other_versions_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = small();
    file.version = 2;
    assert!(load(&options(&file.write(dir.path())), &mut |_| {}).is_ok());
    for (version, word) in [(1, "version 1 "), (4, "unknown"), (3u32.swap_bytes(), "big endian")] {
        assert!(error(|f| f.version = version).contains(word));
    }
}

#[test]
fn every_supported_type_loads_in_layers_and_head() {
    let dir = tempfile::tempdir().unwrap();
    for layers in [Kind::F32, Kind::F16, Kind::Bf16, Kind::Q8_0, Kind::Q4_0, Kind::Q4_1] {
        for head in [Kind::F32, Kind::F16, Kind::Bf16, Kind::Q8_0, Kind::Q4_0, Kind::Q4_1] {
            let path = tiny::llama(SHAPE, layers, head, 1).write(dir.path());
            assert!(load(&options(&path), &mut |_| {}).is_ok(), "{layers:?} {head:?}");
        }
    }
}

#[test]
fn a_file_cut_off_at_any_byte_is_an_error_that_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = small().write(dir.path());
    let whole = std::fs::metadata(&path).unwrap().len();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    for len in (0..whole).rev() {
        file.set_len(len).unwrap();
        match Gguf::open(&path) {
            Err(LoadError::CutOff {
                len: found,
                offset,
                need,
                ..
            }) => {
                assert!(
                    found == len && offset + need > len,
                    "at {len}: {offset} + {need} of {found}"
                );
            }
            // an empty file has no magic to be cut
            Err(LoadError::NotGguf { .. }) if len == 0 => {}
            Err(other) => panic!("cut at {len} of {whole}: {other}"),
            Ok(_) => panic!("cut at {len} of {whole}: read as if whole"),
        }
    }
}

#[test]
fn damaged_bytes_never_crash_the_reader_or_the_loader() {
    let dir = tempfile::tempdir().unwrap();
    let path = small().write(dir.path());
    let whole = std::fs::read(&path).unwrap();
    let header = whole.len()
        - small()
            .tensors
            .iter()
            .map(|t| t.bytes.len().next_multiple_of(32))
            .sum::<usize>();
    let seed = RandomState::new().hash_one(0);
    let mut r = Random(seed);
    let (mut refused, mut loaded) = (0, 0);
    for round in 0..6000 {
        let mut file = OpenOptions::new().write(true).open(&path).unwrap();
        let damage: Vec<(usize, u8)> = (0..=r.below(3)).map(|_| (r.below(header), r.next() as u8)).collect();
        for (at, byte) in &damage {
            put(&mut file, *at, *byte);
        }
        // the seed and the damage, should this take the process down
        let what = format!("seed {seed}, round {round}: {damage:?}");
        let result = std::panic::catch_unwind(|| {
            let gguf = Gguf::open(&path)?;
            for name in gguf.tensors().keys() {
                std::hint::black_box(gguf.tensor(name)?.1.iter().fold(0u8, |a, b| a ^ b));
            }
            Checkpoint::open(&path)?;
            // loading is slower: some of those that get this far
            if round % 8 == 0 {
                load(&options(&path), &mut |_| {})?;
            }
            Ok::<(), LoadError>(())
        });
        match result.unwrap_or_else(|_| panic!("{what}")) {
            Ok(()) => loaded += 1,
            Err(_) => refused += 1,
        }
        for (at, _) in &damage {
            put(&mut file, *at, whole[*at]);
        }
    }
    assert!(
        refused > 1000 && loaded > 100,
        "{refused} refused, {loaded} read: the damage tests nothing"
    );
}

fn put(file: &mut File, at: usize, byte: u8) {
    file.seek(SeekFrom::Start(at as u64)).unwrap();
    file.write_all(&[byte]).unwrap();
}

#[test]
fn counts_and_lengths_beyond_the_file_are_refused_before_anything_is_allocated() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("huge.gguf");
    let header = |tensors: u64, metadata: u64, rest: &[u8]| {
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        out.extend(tensors.to_le_bytes());
        out.extend(metadata.to_le_bytes());
        out.extend(rest);
        std::fs::write(&path, out).unwrap();
        Gguf::open(&path).err().expect("an error").to_string()
    };
    let huge = u64::MAX.to_le_bytes();
    assert!(header(u64::MAX, 0, &[]).contains("cut off"));
    assert!(header(0, u64::MAX, &[]).contains("cut off"));
    // a key of 2^64 - 1 bytes
    assert!(header(0, 1, &huge).contains("cut off"));
    // an array of 2^64 - 1 u64
    let mut array = [
        1u64.to_le_bytes().as_slice(),
        b"k",
        &9u32.to_le_bytes(),
        &10u32.to_le_bytes(),
        &huge,
    ]
    .concat();
    assert!(header(0, 1, &array).contains("18446744073709551615 elements"));
    // of as many texts
    array[13..17].copy_from_slice(&8u32.to_le_bytes());
    assert!(header(0, 1, &array).contains("cut off"));
    // of arrays
    array[13..17].copy_from_slice(&9u32.to_le_bytes());
    assert!(header(0, 1, &array).contains("array of arrays"));
}

#[test]
fn other_files_are_told_from_damaged_ones() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    std::fs::write(&path, b"{\"metadata\"").unwrap();
    let e = Gguf::open(&path).err().unwrap().to_string();
    assert!(e.contains("not a GGUF file") && e.contains("model.safetensors"), "{e}");
    let missing = Gguf::open(&dir.path().join("none.gguf")).err().unwrap().to_string();
    assert!(
        missing.contains("none.gguf") && missing.contains("No such file"),
        "{missing}"
    );
    assert!(Gguf::open(dir.path()).is_err());
}

/// Makes tensor `name` of a file's bytes begin where the first tensor does.
fn move_to_the_first(bytes: &mut [u8], name: &str) {
    let entry = [&(name.len() as u64).to_le_bytes(), name.as_bytes()].concat();
    let at = bytes.windows(entry.len()).position(|w| w == entry).unwrap() + entry.len();
    let dims = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    // the number of dimensions, the dimensions and the type come before it
    bytes[at + 4 + 8 * dims + 4..][..8].fill(0);
}

#[test]
fn tensors_that_lie_on_each_other_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = tiny::llama(Shape { layers: 8, ..SHAPE }, Kind::F32, Kind::F32, 1);
    let path = file.write(dir.path());
    let mut bytes = file.bytes();
    // all in one place, and nothing after it: read so often, progress by bytes would pass 255 percent
    for t in &file.tensors {
        move_to_the_first(&mut bytes, &t.name);
    }
    let lengths = || file.tensors.iter().map(|t| t.bytes.len());
    bytes.truncate(bytes.len() - lengths().sum::<usize>() + lengths().max().unwrap());
    std::fs::write(&path, &bytes).unwrap();
    let mut told = Vec::new();
    let e = load(&options(&path), &mut |p| told.push(p)).err();
    let e = e
        .unwrap_or_else(|| panic!("loaded, with progress {told:?}"))
        .to_string();
    assert!(e.contains("overlap"), "{e}");
    // one pair, by name
    let mut bytes = file.bytes();
    move_to_the_first(&mut bytes, "blk.3.ffn_down.weight");
    std::fs::write(&path, &bytes).unwrap();
    let e = load(&options(&path), &mut |_| {}).err().expect("an error").to_string();
    assert!(
        e.contains("token_embd.weight") && e.contains("blk.3.ffn_down.weight") && e.contains("overlap"),
        "{e}"
    );
}

#[test]
fn another_architecture_is_named() {
    let e = error(|f| f.set("general.architecture", Meta::Text("mamba".into())));
    assert!(e.contains("\"mamba\"") && e.contains("llama"), "{e}");
}

#[test]
fn an_unsupported_type_is_named_with_its_tensor() {
    let e = error(|f| f.tensor("blk.0.attn_k.weight").kind = 10);
    assert!(
        e.contains("blk.0.attn_k.weight") && e.contains("Q2_K") && e.contains("Q8_0"),
        "{e}"
    );
}

#[test]
fn a_missing_or_needless_tensor_is_named() {
    let e = error(|f| f.tensors.retain(|t| t.name != "blk.0.ffn_up.weight"));
    assert!(e.contains("blk.0.ffn_up.weight is missing"), "{e}");
    let e = error(|f| f.tensor("output_norm.weight").name = "blk.0.attn_q.bias".into());
    assert!(e.contains("output_norm.weight is missing"), "{e}");
    let e = error(|f| {
        let mut bias = f.tensor("output_norm.weight").clone();
        bias.name = "blk.0.attn_q.bias".into();
        f.tensors.push(bias);
    });
    assert!(e.contains("blk.0.attn_q.bias has no place"), "{e}");
}

#[test]
fn a_wrong_shape_is_named_with_both_shapes() {
    let e = error(|f| f.tensor("blk.0.attn_q.weight").dims = vec![32, 16]);
    assert!(
        e.contains("attn_q") && e.contains("[32, 16]") && e.contains("[32, 32]"),
        "{e}"
    );
    let e = error(|f| f.tensor("token_embd.weight").dims = vec![32]);
    assert!(e.contains("token_embd"), "{e}");
    for dims in [
        vec![0, 32],
        vec![31, 32],
        vec![u64::MAX - 31, 32],
        vec![32, u64::MAX],
        vec![32; 5],
    ] {
        let e = error(|f| f.tensor("blk.0.attn_q.weight").dims = dims.clone());
        assert!(e.contains("blk.0.attn_q.weight"), "{dims:?}: {e}");
    }
}

#[test]
fn a_key_whose_meaning_is_not_known_is_refused_by_name() {
    let e = error(|f| f.set("llama.attention.sliding_window", Meta::U32(128)));
    assert!(e.contains("llama.attention.sliding_window") && e.contains("128"), "{e}");
    for key in ["llama.rope.scaling.factor", "llama.rope.scale_linear"] {
        assert!(error(|f| f.set(key, Meta::F32(4.0))).contains(key));
    }
    let e = error(|f| f.set("llama.rope.scaling.type", Meta::Text("yarn".into())));
    assert!(e.contains("llama.rope.scaling.type") && e.contains("yarn"), "{e}");
    assert!(error(|f| f.set("llama.expert_count", Meta::U32(8))).contains("experts"));
    // without effect
    let dir = tempfile::tempdir().unwrap();
    let mut file = small();
    file.set("llama.rope.scaling.type", Meta::Text("none".into()));
    file.set("llama.rope.scaling.factor", Meta::F32(1.0));
    file.set("llama.vocab_size", Meta::U32(9));
    file.set("general.quantization_version", Meta::U32(2));
    assert!(load(&options(&file.write(dir.path())), &mut |_| {}).is_ok());
}

/// The small file as one of another architecture, with the tensors that its layers have beside the others.
fn qwen(architecture: &str, more: &[(&str, u64)]) -> tiny::File {
    let mut file = small();
    for (key, _) in &mut file.metadata {
        if let Some(rest) = key.strip_prefix("llama.") {
            *key = format!("{architecture}.{rest}");
        }
    }
    file.set("general.architecture", Meta::Text(architecture.into()));
    for (name, n) in more {
        file.tensors.push(tiny::Tensor {
            name: format!("blk.0.{name}"),
            kind: 0,
            dims: vec![*n],
            bytes: Kind::F32.encode(&vec![0.5; *n as usize]),
        });
    }
    file
}

#[test]
fn qwen2_has_biases_and_qwen3_norms_of_heads() {
    let dir = tempfile::tempdir().unwrap();
    let open = |file: &tiny::File| Checkpoint::open(&file.write(dir.path()));
    let said = |file: &tiny::File| open(file).err().expect("an error").to_string();
    let biases = [("attn_q.bias", 32), ("attn_k.bias", 16), ("attn_v.bias", 16)];
    let norms = [("attn_q_norm.weight", 16), ("attn_k_norm.weight", 16)];

    let qwen2 = open(&qwen("qwen2", &biases)).unwrap();
    let c = qwen2.config();
    assert_eq!((c.architecture, c.rope_pairs), (Architecture::Qwen2, RopePairs::Halves));
    assert!(c.qkv_bias && !c.qk_norm);
    assert_eq!(qwen2.tensor(Part::Layer(0, LayerPart::KBias)).unwrap().dims, [16]);
    assert!(said(&qwen("qwen2", &biases[..2])).contains("blk.0.attn_v.bias is missing"));
    assert!(said(&qwen("qwen2", &norms)).contains("attn_q.bias is missing"));

    let qwen3 = open(&qwen("qwen3", &norms)).unwrap();
    let c = qwen3.config();
    assert_eq!((c.architecture, c.rope_pairs), (Architecture::Qwen3, RopePairs::Halves));
    assert!(c.qk_norm && !c.qkv_bias);
    assert!(
        said(&qwen("qwen3", &[norms, [biases[0], biases[1]]].concat()))
            .contains("attn_k.bias has no place in architecture qwen3")
    );

    let c = open(&small()).unwrap().config().clone();
    assert_eq!(
        (c.architecture, c.rope_pairs),
        (Architecture::Llama, RopePairs::Neighbours)
    );
    // keys of another architecture are not read
    let mut file = qwen("qwen2", &biases);
    file.set("qwen2.attention.sliding_window", Meta::U32(128));
    assert!(said(&file).contains("qwen2.attention.sliding_window"));
    let mut file = qwen("qwen2", &biases);
    file.set("qwen2.rope.scaling.type", Meta::Text("yarn".into()));
    assert!(said(&file).contains("qwen2.rope.scaling.type"));
}

#[test]
fn values_that_do_not_go_together_are_named() {
    for (key, value) in [
        ("llama.attention.head_count", Meta::U32(0)),
        ("llama.attention.head_count_kv", Meta::U32(3)),
        ("llama.embedding_length", Meta::U32(33)),
        ("llama.attention.value_length", Meta::U32(8)),
        ("llama.attention.key_length", Meta::U32(4)),
        ("llama.block_count", Meta::Text("many".into())),
        ("llama.attention.layer_norm_rms_epsilon", Meta::F32(f32::NAN)),
        ("llama.rope.freq_base", Meta::F32(-1.0)),
        ("llama.vocab_size", Meta::U32(10)),
        ("general.alignment", Meta::U32(48)),
        ("tokenizer.ggml.eos_token_id", Meta::U32(9)),
    ] {
        let e = error(|f| f.set(key, value.clone()));
        assert!(e.contains(key), "{key}: {e}");
    }
    let e = error(|f| f.metadata.retain(|(k, _)| k != "llama.block_count"));
    assert!(
        e.contains("llama.block_count is missing") || e.contains("llama.block_count: is missing"),
        "{e}"
    );
    assert!(error(|f| f.metadata.push(("general.name".into(), Meta::Text("again".into())))).contains("twice"));
    assert!(error(|f| f.tensors.push(f.tensors[0].clone())).contains("twice"));
}

#[test]
fn options_that_do_not_fit_are_refused_by_flag() {
    let dir = tempfile::tempdir().unwrap();
    let path = small().write(dir.path());
    let refused = |o: LoadOptions| load(&o, &mut |_| {}).err().expect("an error").to_string();
    let base = options(&path);
    assert!(
        refused(LoadOptions {
            page_tokens: 12,
            ..base.clone()
        })
        .contains("--page-tokens 12")
    );
    assert!(
        refused(LoadOptions {
            kv: KvBudget::Pages(0),
            ..base.clone()
        })
        .contains("--kv-pages 0")
    );
    assert!(
        refused(LoadOptions {
            kv: KvBudget::Mib(0),
            ..base.clone()
        })
        .contains("--kv-memory-mib 0")
    );
    assert!(
        refused(LoadOptions {
            threads: 0,
            ..base.clone()
        })
        .contains("--threads 0")
    );
    let e = refused(LoadOptions {
        max_length_tokens: Some(600),
        ..base.clone()
    });
    assert!(e.contains("--max-length-tokens 600") && e.contains("512"), "{e}");
    let e = refused(LoadOptions {
        max_length_tokens: Some(65),
        ..base.clone()
    });
    assert!(
        e.contains("--max-length-tokens 65") && e.contains("--kv-pages 4 holds 64") && e.contains("raise --kv-pages"),
        "{e}"
    );
    // 31 pages of 16 tokens, where the model takes 512
    let e = refused(LoadOptions {
        kv: KvBudget::Pages(31),
        max_length_tokens: None,
        ..base.clone()
    });
    assert!(
        e.contains("--kv-pages 31") && e.contains("holds 496 tokens") && e.contains("--max-length-tokens 496"),
        "{e}"
    );
    for (more, said) in [
        (
            LoadOptions {
                page_tokens: 1032,
                ..base.clone()
            },
            "--page-tokens 1032",
        ),
        (
            LoadOptions {
                max_step_tokens: 65_537,
                ..base.clone()
            },
            "--step-tokens 65537",
        ),
        (
            LoadOptions {
                max_step_seqs: 4_097,
                ..base.clone()
            },
            "--max-running 4097",
        ),
    ] {
        let e = refused(more);
        assert!(e.contains(said), "{e} / {said}");
    }
    // more than any machine has
    let e = refused(LoadOptions {
        kv: KvBudget::Mib(1 << 34),
        page_tokens: 1024,
        ..base
    });
    assert!(e.contains("MiB are available") || e.contains("2^32 tokens"), "{e}");
}

#[test]
fn too_little_memory_is_said_before_any_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = tiny::llama(
        Shape {
            kv_heads: 2,
            heads: 64,
            head_dim: 1024,
            ..SHAPE
        },
        Kind::Q4_1,
        Kind::Q8_0,
        1,
    );
    file.set("llama.context_length", Meta::U32(1 << 20));
    let path = file.write(dir.path());
    // 64 TiB of KV
    let o = LoadOptions {
        kv: KvBudget::Mib(1 << 26),
        page_tokens: 1024,
        ..options(&path)
    };
    let e = load(&o, &mut |_| {}).err().unwrap();
    assert!(matches!(e, LoadError::Memory { .. } | LoadError::Option { .. }), "{e}");
    let o = LoadOptions {
        kv: KvBudget::Mib(1 << 24),
        page_tokens: 1024,
        ..options(&path)
    };
    let e = load(&o, &mut |_| {}).err().unwrap();
    assert!(matches!(e, LoadError::Memory { kv_mib: 16_777_216, .. }), "{e}");
    assert!(e.to_string().contains("--kv-memory-mib"), "{e}");
}
