//! Folders of safetensors files: whole ones are read, all others give an error that names file, key or tensor, none a crash.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;

use serde_json::{Value, json};
use tandem_engine::model::checkpoint::{Checkpoint, LayerPart, Part};
use tandem_engine::model::config::{Architecture, RopePairs, RopeScaling};
use tandem_engine::model::revision;
use tandem_engine::model::safetensors::container::Safetensors;
use tandem_engine::model::{KvBudget, LoadError, LoadOptions, Scorer};

use crate::tiny::{self, Kind, Random, Shape};
use crate::tiny_hf::{self, Folder};

const SHAPE: Shape = Shape {
    layers: 2,
    hidden: 32,
    heads: 2,
    kv_heads: 1,
    head_dim: 16,
    inner: 32,
    vocab: 9,
    ..Shape::SMALL
};

fn small() -> Folder {
    tiny_hf::llama(SHAPE, Kind::F32, 1)
}

/// Opens what was changed.
fn open(change: impl FnOnce(&mut Folder)) -> Result<Checkpoint, LoadError> {
    let dir = tempfile::tempdir().unwrap();
    let mut folder = small();
    change(&mut folder);
    folder.write(dir.path());
    Checkpoint::open(dir.path())
}

fn error(change: impl FnOnce(&mut Folder)) -> String {
    open(change).err().expect("an error").to_string()
}

/// The error of `config.json` with this key set.
fn refused(key: &str, value: Value) -> String {
    let error = error(|f| f.config[key] = value);
    assert!(error.contains("config.json"), "{error}: names no file");
    error
}

#[test]
fn a_whole_folder_is_read() {
    let checkpoint = open(|f| {
        f.config["eos_token_id"] = json!([2, 3]);
        f.generation = Some(json!({"eos_token_id": [3, 4], "temperature": 0.6}));
    })
    .unwrap();
    let c = checkpoint.config();
    assert_eq!(
        (c.architecture, c.rope_pairs, c.rope_scaling, c.qkv_bias, c.qk_norm),
        (Architecture::Llama, RopePairs::Halves, None, false, false)
    );
    assert_eq!(
        (
            c.num_hidden_layers,
            c.hidden_size,
            c.num_attention_heads,
            c.num_key_value_heads
        ),
        (2, 32, 2, 1)
    );
    assert_eq!(
        (c.head_dim, c.rope_dim, c.intermediate_size, c.vocab_size),
        (16, 16, 32, 9)
    );
    assert_eq!(
        (c.max_position_embeddings, c.rms_norm_eps, c.rope_theta),
        (512, 1e-5, 10_000.0)
    );
    assert_eq!(c.end_tokens, [2, 3, 4]);
    let k = checkpoint.tensor(Part::Layer(1, LayerPart::K)).unwrap();
    assert_eq!((k.dims, k.bytes.len()), ([32, 16].as_slice(), 32 * 16 * 4));
    assert_eq!(k.bytes, small().tensor("model.layers.1.self_attn.k_proj.weight").bytes);
    assert!(checkpoint.tensor(Part::Output).is_none());
    assert!(checkpoint.tensor(Part::RopeFreqs).is_none());
}

/// The logits of a text, as bits.
fn logits(path: &Path) -> Vec<u32> {
    let options = LoadOptions {
        threads: 1,
        kv: KvBudget::Pages(8),
        max_length_tokens: Some(64),
        max_step_tokens: 8,
        max_step_seqs: 8,
        ..LoadOptions::new(path)
    };
    let mut scorer = Scorer::load(&options).unwrap();
    let ids: Vec<u32> = (0..20).map(|i| i * 5 % 9).collect();
    let mut all = Vec::new();
    let mut each = |_, row: &[f32]| all.extend(row.iter().map(|v| v.to_bits()));
    scorer.score(&ids, 8, &mut each).unwrap();
    all
}

#[test]
fn the_same_weights_from_a_folder_and_from_a_gguf_give_the_same_logits() {
    for (shape, kind) in [
        (SHAPE, Kind::F32),
        (Shape { tied: false, ..SHAPE }, Kind::Bf16),
        (
            Shape {
                heads: 4,
                kv_heads: 2,
                head_dim: 24,
                ..SHAPE
            },
            Kind::F16,
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let gguf = logits(&tiny::llama(shape, kind, kind, 5).write(dir.path()));
        for shards in [1, 3] {
            let dir = tempfile::tempdir().unwrap();
            let folder = tiny_hf::llama(shape, kind, 5);
            Folder { shards, ..folder }.write(dir.path());
            assert!(logits(dir.path()) == gguf, "{shape:?} {kind:?} in {shards} files");
        }
    }
}

#[test]
fn the_folder_names_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("SmolLM2-135M-Instruct");
    std::fs::create_dir(&path).unwrap();
    small().write(&path);
    assert_eq!(Checkpoint::open(&path).unwrap().config().name, "SmolLM2-135M-Instruct");
}

#[test]
fn shards_hold_what_one_file_holds() {
    let whole = open(|_| {}).unwrap();
    let dir = tempfile::tempdir().unwrap();
    Folder { shards: 3, ..small() }.write(dir.path());
    let sharded = Checkpoint::open(dir.path()).unwrap();
    for part in Part::all(whole.config()) {
        let bytes = |c: &Checkpoint| c.tensor(part).map(|t| t.bytes.to_vec());
        assert_eq!(bytes(&whole), bytes(&sharded), "{part:?}");
    }
    assert_ne!(whole.hash(), sharded.hash());

    let index = dir.path().join("model.safetensors.index.json");
    let text = std::fs::read_to_string(&index).unwrap();
    let error_of = |text: &str| {
        std::fs::write(&index, text).unwrap();
        Checkpoint::open(dir.path()).err().expect("an error").to_string()
    };
    let mut map: Value = serde_json::from_str(&text).unwrap();
    let (first, second) = ("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors");
    for outside in [
        "../model.safetensors",
        "/etc/passwd",
        "sub/m.safetensors",
        "config.json",
        "",
    ] {
        let e = error_of(&text.replace(first, outside));
        assert!(e.contains("no .safetensors file of the folder"), "{outside}: {e}");
    }
    let norm = "model.norm.weight";
    let home = map["weight_map"][norm].as_str().unwrap().to_owned();
    map["weight_map"][norm] = json!(if home == first { second } else { first });
    let e = error_of(&map.to_string());
    assert!(e.contains(norm), "{e}");
    map["weight_map"].as_object_mut().unwrap().remove(norm);
    let e = error_of(&map.to_string());
    assert!(e.contains(norm) && e.contains("the index has it not"), "{e}");
    map["weight_map"][norm] = json!(home);
    map["weight_map"]["model.more.weight"] = json!(first);
    let e = error_of(&map.to_string());
    assert!(e.contains("model.more.weight is missing") && e.contains(first), "{e}");
    assert!(error_of(&text.replace('{', "[")).contains("no index"));
    let twice = text.replacen("\"weight_map\":{", "\"weight_map\":{\"model.norm.weight\":\"x\",", 1);
    assert!(error_of(&twice).contains("twice"));
    std::fs::write(&index, &text).unwrap();
    std::fs::remove_file(dir.path().join(second)).unwrap();
    let e = Checkpoint::open(dir.path()).err().unwrap().to_string();
    assert!(e.contains(second) && e.contains("No such file"), "{e}");
}

#[test]
fn a_missing_file_is_named_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let error = || Checkpoint::open(dir.path()).err().expect("an error").to_string();
    let e = error();
    assert!(e.contains("no config.json") && e.contains(".gguf"), "{e}");
    small().write(dir.path());
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    let e = error();
    assert!(e.contains("no model.safetensors") && e.contains("index.json"), "{e}");
}

#[test]
fn the_hash_covers_every_file_and_nothing_but_them() {
    let hash = |folder: &Folder| {
        let dir = tempfile::tempdir().unwrap();
        folder.write(dir.path());
        std::fs::write(dir.path().join("README.md"), dir.path().as_os_str().as_encoded_bytes()).unwrap();
        Checkpoint::open(dir.path()).unwrap().hash()
    };
    let base = small();
    assert_eq!(hash(&base), hash(&base));
    let mut hashes = BTreeSet::from([hash(&base)]);
    for change in [
        (|f: &mut Folder| f.config["rope_theta"] = json!(20_000.0)) as fn(&mut Folder),
        |f| f.generation = Some(json!({})),
        |f| f.generation = Some(json!({"eos_token_id": 2})),
        |f| f.tensors[0].bytes[0] ^= 1,
        |f| f.shards = 2,
        |f| f.shards = 3,
    ] {
        let mut folder = base.clone();
        change(&mut folder);
        assert!(hashes.insert(hash(&folder)));
    }
}

#[test]
fn a_folders_revision_is_what_sha256sum_says_of_its_files() {
    let dir = tempfile::tempdir().unwrap();
    for (file, content) in [("b.json", "abc"), ("a.safetensors", "abd"), (".hidden", "x")] {
        std::fs::write(dir.path().join(file), content).unwrap();
    }
    std::fs::create_dir(dir.path().join("sub")).unwrap();
    // LC_ALL=C sha256sum * | sha256sum
    let expected = "33796b2a6c2755ba7170acbd767f1cc3ff4dfad6065eed4b3cff32b0457c953c";
    revision::check(dir.path(), expected, [0; 32]).unwrap();
    std::fs::write(dir.path().join("b.json"), "abx").unwrap();
    let error = revision::check(dir.path(), expected, [0; 32]).unwrap_err().to_string();
    assert!(error.contains(expected), "{error}");
}

#[test]
fn architectures_differ_in_their_parts() {
    let qwen = |class: &str, kind: &str| {
        let mut f = small();
        f.config["architectures"] = json!([class]);
        f.config["model_type"] = json!(kind);
        f
    };
    let opened = |f: &Folder| {
        let dir = tempfile::tempdir().unwrap();
        f.write(dir.path());
        Checkpoint::open(dir.path())
    };
    let said = |f: &Folder| opened(f).err().expect("an error").to_string();
    let mut f = qwen("Qwen2ForCausalLM", "qwen2");
    assert!(said(&f).contains("self_attn.q_proj.bias is missing"));
    for l in 0..2 {
        f.add(&format!("model.layers.{l}.self_attn.q_proj.bias"), &[32], 1);
        f.add(&format!("model.layers.{l}.self_attn.k_proj.bias"), &[16], 2);
        f.add(&format!("model.layers.{l}.self_attn.v_proj.bias"), &[16], 3);
    }
    f.config["sliding_window"] = json!(32768);
    f.config["use_sliding_window"] = json!(false);
    f.config["max_window_layers"] = json!(21);
    let checkpoint = opened(&f).unwrap();
    assert_eq!(checkpoint.config().architecture, Architecture::Qwen2);
    assert!(checkpoint.config().qkv_bias && !checkpoint.config().qk_norm);
    assert_eq!(checkpoint.tensor(Part::Layer(1, LayerPart::VBias)).unwrap().dims, [16]);
    f.config["architectures"] = json!(["LlamaForCausalLM"]);
    f.config["model_type"] = json!("llama");
    assert!(said(&f).contains("_proj.bias has no place in architecture llama"));

    let mut f = qwen("Qwen3ForCausalLM", "qwen3");
    assert!(said(&f).contains("self_attn.q_norm.weight is missing"));
    for l in 0..2 {
        f.add(&format!("model.layers.{l}.self_attn.q_norm.weight"), &[16], 1);
        f.add(&format!("model.layers.{l}.self_attn.k_norm.weight"), &[16], 2);
    }
    let checkpoint = opened(&f).unwrap();
    assert_eq!(checkpoint.config().architecture, Architecture::Qwen3);
    assert!(checkpoint.config().qk_norm && !checkpoint.config().qkv_bias);

    assert!(refused("model_type", json!("qwen2")).contains("LlamaForCausalLM"));
    for other in [json!(["LlamaForSequenceClassification"]), json!(["MistralForCausalLM"])] {
        let e = refused("architectures", other.clone());
        assert!(
            e.contains(other[0].as_str().unwrap()) && e.contains("Qwen3ForCausalLM"),
            "{e}"
        );
    }
    for odd in [json!([]), json!("LlamaForCausalLM"), json!(["a", "b"]), json!([1])] {
        assert!(refused("architectures", odd).contains("architectures"));
    }
    let by_type = |f: &mut Folder| {
        f.config.as_object_mut().unwrap().remove("architectures");
    };
    assert_eq!(open(by_type).unwrap().config().architecture, Architecture::Llama);
}

#[test]
fn a_head_is_tied_or_there() {
    let untied = tiny_hf::llama(Shape { tied: false, ..SHAPE }, Kind::Bf16, 1);
    let checkpoint = open(|f| *f = untied.clone()).unwrap();
    assert_eq!(checkpoint.tensor(Part::Output).unwrap().dims, [32, 9]);
    assert!(error(|f| f.config["tie_word_embeddings"] = json!(false)).contains("lm_head.weight is missing"));
    // the default is false
    let removed = |f: &mut Folder| {
        f.config.as_object_mut().unwrap().remove("tie_word_embeddings");
    };
    assert!(error(removed).contains("lm_head.weight is missing"));
    // a head beside tied embeddings may repeat them, and nothing else
    let e = error(|f| {
        *f = untied.clone();
        f.config["tie_word_embeddings"] = json!(true);
    });
    assert!(e.contains("tie_word_embeddings") && e.contains("differs"), "{e}");
    let repeated = |f: &mut Folder| {
        let mut head = f.tensor("model.embed_tokens.weight").clone();
        head.name = "lm_head.weight".to_owned();
        f.tensors.push(head);
    };
    assert!(open(repeated).unwrap().tensor(Part::Output).is_none());
}

#[test]
fn rope_is_read_in_both_forms() {
    let read = |change: &dyn Fn(&mut Value)| {
        let c = open(|f| change(&mut f.config)).unwrap().config().clone();
        (c.rope_theta, c.rope_scaling)
    };
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256
    });
    let scaling = Some(RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 256,
    });
    assert_eq!(read(&|c| c["rope_scaling"] = llama3.clone()), (10_000.0, scaling));
    let with = |key: &str, value: Value| {
        let mut table = llama3.clone();
        table[key] = value;
        table
    };
    assert_eq!(
        read(&|c| c["rope_scaling"] = with("type", json!("llama3"))),
        (10_000.0, scaling)
    );
    let newer = |c: &mut Value| {
        c.as_object_mut().unwrap().remove("rope_theta");
        c["rope_parameters"] = with("rope_theta", json!(500_000));
    };
    assert_eq!(read(&newer), (500_000.0, scaling));
    assert_eq!(
        read(&|c| c["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 10_000.0})),
        (10_000.0, None)
    );
    assert_eq!(read(&|c| c["rope_scaling"] = Value::Null), (10_000.0, None));
    let none = |c: &mut Value| {
        c.as_object_mut().unwrap().remove("rope_theta");
    };
    assert_eq!(read(&none), (10_000.0, None));

    for (table, said) in [
        (json!({"rope_type": "yarn", "factor": 4.0}), "yarn"),
        (json!({"type": "linear", "factor": 2.0}), "linear"),
        (json!({"rope_type": "dynamic", "factor": 2.0}), "dynamic"),
        (json!({"rope_type": 3}), "rope_type"),
        (json!({"rope_type": "default", "factor": 2.0}), "rope_scaling.factor"),
        (with("type", json!("linear")), "rope_scaling.type"),
        (with("factor", json!(0)), "rope_scaling.factor"),
        (with("factor", json!("8")), "rope_scaling.factor"),
        (with("low_freq_factor", json!(4.0)), "rope_scaling.high_freq_factor"),
        (
            with("original_max_position_embeddings", Value::Null),
            "original_max_position_embeddings is missing",
        ),
        (with("attention_factor", json!(1.0)), "rope_scaling.attention_factor"),
        (with("rope_theta", json!(5.0)), "rope_scaling.rope_theta"),
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (json!({"full_attention": {}}), "rope_scaling.full_attention"),
        (json!("yarn"), "rope_scaling"),
    ] {
        let e = refused("rope_scaling", table.clone()).replace(": is missing", " is missing");
        assert!(e.contains(said), "{table}: {e}");
    }
    let both = |f: &mut Folder| {
        f.config["rope_scaling"] = llama3.clone();
        f.config["rope_parameters"] = llama3.clone();
    };
    assert!(error(both).contains("rope_parameters"));
}

#[test]
fn a_key_that_would_change_the_answers_is_refused_by_name() {
    for (key, value) in [
        ("quantization_config", json!({"quant_method": "awq", "bits": 4})),
        ("use_sliding_window", json!(true)),
        ("sliding_window", json!(4096)),
        ("attention_bias", json!(true)),
        ("mlp_bias", json!(true)),
        ("rope_interleaved", json!(true)),
        ("hidden_act", json!("gelu")),
        ("layer_types", json!(["full_attention", "sliding_attention"])),
        ("layer_types", json!(["full_attention"])),
        ("layer_types", json!("full_attention")),
        ("tie_word_embeddings", json!("yes")),
        ("num_local_experts", json!(8)),
        ("final_logit_softcapping", json!(30.0)),
        ("no_rope_layers", json!([1, 0])),
        ("some_new_key", Value::Null),
        ("eos_token_id", json!(9)),
        ("eos_token_id", json!([2, "</s>"])),
        ("eos_token_id", json!(vec![0; 65])),
        ("num_hidden_layers", json!(0)),
        ("num_hidden_layers", json!(2.0)),
        ("hidden_size", json!(33)),
        ("hidden_size", json!("32")),
        ("num_key_value_heads", json!(3)),
        ("num_attention_heads", json!(-2)),
        ("head_dim", json!(12)),
        ("intermediate_size", json!(40)),
        ("vocab_size", json!(1u64 << 40)),
        ("rms_norm_eps", json!(0)),
        ("rope_theta", json!(-1.0)),
    ] {
        let e = refused(key, value.clone());
        assert!(e.contains(key), "{key} {value}: {e}");
    }
    let e = refused("quantization_config", json!({"quant_method": "awq"}));
    assert!(e.contains("awq") && e.contains("GGUF"), "{e}");
    for key in [
        "num_hidden_layers",
        "hidden_size",
        "vocab_size",
        "max_position_embeddings",
    ] {
        let e = error(|f| {
            f.config.as_object_mut().unwrap().remove(key);
        });
        assert!(e.contains(key) && e.contains("is missing"), "{e}");
    }
    let e = error(|f| f.generation = Some(json!({"eos_token_id": 900})));
    assert!(e.contains("generation_config.json") && e.contains("900"), "{e}");
    for text in ["", "[]", "{", "3"] {
        let dir = tempfile::tempdir().unwrap();
        small().write(dir.path());
        std::fs::write(dir.path().join("config.json"), text).unwrap();
        let e = Checkpoint::open(dir.path()).err().unwrap().to_string();
        assert!(e.contains("config.json") && e.contains("JSON"), "{e}");
    }
}

/// What published configs hold beside sizes: each as its model's authors have it.
#[test]
fn keys_without_effect_are_taken() {
    let published = [
        json!({"attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1, "initializer_range": 0.02, "mlp_bias": false,
            "pretraining_tp": 1, "rope_scaling": null, "use_cache": true, "is_llama_config": true, "rope_interleaved": false,
            "pad_token_id": 2, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}),
        json!({"max_window_layers": 2, "sliding_window": null, "use_sliding_window": false, "use_mrope": false,
            "layer_types": ["full_attention", "full_attention"], "dtype": "bfloat16"}),
        json!({"_name_or_path": "", "chunk_size_feed_forward": 0, "id2label": {"0": "LABEL_0"}, "is_encoder_decoder": false,
            "label2id": {"LABEL_0": 0}, "output_attentions": false, "output_hidden_states": false, "problem_type": null,
            "return_dict": true, "torch_dtype": null, "eos_token_id": null}),
        json!({"hidden_act": "swish", "sliding_window": 131_072, "use_sliding_window": false, "num_key_value_heads": 1}),
    ];
    for keys in published {
        let opened = open(|f| {
            for (key, value) in keys.as_object().unwrap() {
                f.config[key.as_str()] = value.clone();
            }
        });
        assert!(opened.is_ok(), "{}", opened.err().unwrap());
    }
}

#[test]
fn tensors_are_named_where_they_are_at_fault() {
    let norm = "model.layers.1.input_layernorm.weight";
    let e = error(|f| f.tensors.retain(|t| t.name != norm));
    assert!(e.contains(norm) && e.contains("missing"), "{e}");
    assert!(error(|f| f.add("model.layers.2.mlp.up_proj.weight", &[32, 32], 1)).contains("layers.2"));
    let e = error(|f| f.tensor("model.layers.0.mlp.up_proj.weight").shape = vec![16, 64]);
    assert!(
        e.contains("up_proj") && e.contains("[64, 16]") && e.contains("[32, 32]"),
        "{e}"
    );
    let e = error(|f| f.tensor(norm).shape = vec![]);
    assert!(e.contains(norm), "{e}");
    let e = error(|f| f.tensor(norm).dtype = "F8_E4M3");
    assert!(e.contains(norm) && e.contains("F8_E4M3") && e.contains("BF16"), "{e}");
    let old = |f: &mut Folder| f.add("model.layers.0.self_attn.rotary_emb.inv_freq", &[8], 1);
    assert!(open(old).is_ok());
}

/// The error of a file with this header, which says nothing of the length, and so many bytes of data.
fn header(text: &str, data: usize) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.safetensors");
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    std::fs::write(&path, bytes).unwrap();
    match Safetensors::open(&path) {
        Err(e) => e.to_string(),
        Ok(_) => "read".to_owned(),
    }
}

#[test]
fn headers_that_do_not_fit_their_file_are_refused() {
    let one = |shape: &str, start: u64, end: u64| {
        format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":[{start},{end}]}}}}"#)
    };
    assert_eq!(header(&one("[2]", 0, 8), 8), "read");
    assert_eq!(header(r#"{"__metadata__":{"dtype":"F32"}}"#, 0), "read");
    for (text, data, said) in [
        (one("[2]", 0, 8), 7, "cut off"),
        (one("[2]", 0, 8), 9, "the file has"),
        (one("[3]", 0, 8), 8, "not its length"),
        (one("[2]", 8, 0), 8, "not its length"),
        (one("[2]", 1, 9), 9, "begins at byte 1"),
        (one("[4294967296,4294967296,4]", 0, 8), 8, "not its length"),
        (one("[1,1,1,1,2]", 0, 8), 8, "5 dimensions"),
        (one("[2]", u64::MAX - 8, u64::MAX), 8, "cut off"),
        (one("[-2]", 0, 8), 8, "tensor a"),
        (one("[2]", 0, 8).replace("F32", "I64"), 8, "I64"),
        (one("[2]", 0, 8).replace("}}", ",\"more\":1}}"), 8, "more"),
        (one("[2]", 0, 8).replace("}}", "},\"a\":{}}"), 8, "twice"),
        ("[]".to_owned(), 0, "header"),
        ("{".to_owned(), 0, "header"),
    ] {
        let e = header(&text, data);
        assert!(e.contains(said), "{text} with {data}: {e}");
    }
    // overlap, and a sum of lengths beyond 64 bits
    let entry = |name: &str, n: u64, start: u64, end: u64| {
        format!(r#""{name}":{{"dtype":"F32","shape":[{n}],"data_offsets":[{start},{end}]}}"#)
    };
    let e = header(&format!("{{{},{}}}", entry("a", 2, 0, 8), entry("b", 2, 4, 12)), 12);
    assert!(e.contains("tensor b begins at byte 4"), "{e}");
    let far = 1 << 61;
    let all: Vec<String> = (0..7)
        .map(|i| entry(&i.to_string(), far / 4, i * far, (i + 1) * far))
        .collect();
    assert!(header(&format!("{{{}}}", all.join(",")), 8).contains("cut off"));

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.safetensors");
    for (bytes, said) in [
        (b"".to_vec(), "cut off"),
        (vec![1; 7], "cut off"),
        (u64::MAX.to_le_bytes().to_vec(), "more than"),
        (100_000_001u64.to_le_bytes().to_vec(), "more than"),
        (100u64.to_le_bytes().to_vec(), "cut off"),
    ] {
        std::fs::write(&path, bytes).unwrap();
        let e = Safetensors::open(&path).err().unwrap().to_string();
        assert!(e.contains(said) && e.contains("m.safetensors"), "{e}");
    }
}

#[test]
fn a_file_cut_off_at_any_byte_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.safetensors");
    let folder = small();
    let whole = tiny_hf::file(&folder.tensors.iter().take(4).collect::<Vec<_>>());
    std::fs::write(&path, &whole).unwrap();
    assert!(Safetensors::open(&path).is_ok());
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    for len in (0..whole.len() as u64).rev() {
        file.set_len(len).unwrap();
        let e = Safetensors::open(&path)
            .err()
            .unwrap_or_else(|| panic!("cut at {len}: read as if whole"));
        assert!(
            matches!(e, LoadError::CutOff { len: found, .. } if found == len),
            "cut at {len}: {e}"
        );
    }
}

#[test]
fn damaged_bytes_never_crash_the_readers() {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder { shards: 2, ..small() };
    folder.write(dir.path());
    let seed = RandomState::new().hash_one(0);
    let mut r = Random(seed);
    let (mut refused, mut read) = (0, 0);
    for name in [
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
    ] {
        let path = dir.path().join(name);
        let whole = std::fs::read(&path).unwrap();
        let reach = whole.len().min(900);
        for round in 0..600 {
            let mut bytes = whole.clone();
            let damage: Vec<(usize, u8)> = (0..=r.below(3)).map(|_| (r.below(reach), r.next() as u8)).collect();
            for (at, byte) in &damage {
                bytes[*at] = *byte;
            }
            std::fs::write(&path, bytes).unwrap();
            let what = format!("seed {seed}, {name}, round {round}: {damage:?}");
            match std::panic::catch_unwind(|| opened(dir.path())).unwrap_or_else(|_| panic!("{what}")) {
                Ok(()) => read += 1,
                Err(_) => refused += 1,
            }
        }
        std::fs::write(&path, &whole).unwrap();
    }
    assert!(opened(dir.path()).is_ok());
    assert!(
        refused > 400,
        "{refused} refused, {read} read: the damage tests nothing"
    );
}

fn opened(folder: &Path) -> Result<(), LoadError> {
    let checkpoint = Checkpoint::open(folder)?;
    for part in Part::all(checkpoint.config()) {
        let sum = checkpoint.tensor(part).map(|t| t.bytes.iter().fold(0u8, |a, b| a ^ b));
        std::hint::black_box(sum);
    }
    Ok(())
}
