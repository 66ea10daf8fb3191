//! Files that are damaged, unknown or incomplete are refused with their name, the value and a remedy.

use std::path::Path;

use proptest::prelude::*;
use tandem_router::text::{ChatInput, Message, Text, TextError};

use super::{TINY, data, gguf_string, tiny_with};

fn failure(path: &Path) -> String {
    match Text::load(path) {
        Ok(_) => panic!("{} was accepted", path.display()),
        Err(error) => {
            assert!(!error.is_request_fault());
            error.to_string()
        }
    }
}

#[test]
fn an_unknown_tokenizer_is_guessed_at() {
    let folder = tempfile::tempdir().unwrap();
    let pre = |value: Option<&[u8]>| failure(&tiny_with(folder.path(), "tokenizer.ggml.pre", value));
    let text = pre(Some(&gguf_string("no-such-cut")));
    assert!(
        text.contains("tokenizer.ggml.pre \"no-such-cut\"") && text.contains("tokenizer.json"),
        "{text}"
    );
    assert!(pre(None).contains("tokenizer.ggml.pre"));
    let model = |value: &str| {
        failure(&tiny_with(
            folder.path(),
            "tokenizer.ggml.model",
            Some(&gguf_string(value)),
        ))
    };
    assert!(model("llama").contains("tokenizer.ggml.model \"llama\""));
}

#[test]
fn an_id_that_does_not_exist_becomes_a_special_token() {
    let folder = tempfile::tempdir().unwrap();
    let id = [4u32.to_le_bytes(), 100_000u32.to_le_bytes()].concat();
    let text = failure(&tiny_with(folder.path(), "tokenizer.ggml.eos_token_id", Some(&id)));
    assert!(text.contains("eos_token_id is 100000"), "{text}");
}

#[test]
fn a_vocabulary_that_contradicts_itself_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let kinds = |count: u64, kind: i32| {
        let all = vec![kind.to_le_bytes(); count as usize].concat();
        [&9u32.to_le_bytes()[..], &5u32.to_le_bytes(), &count.to_le_bytes(), &all].concat()
    };
    let with_kinds = |kinds: &[u8]| failure(&tiny_with(folder.path(), "tokenizer.ggml.token_type", Some(kinds)));
    let tokens = TINY.vocabulary().len() as u64;
    assert!(with_kinds(&kinds(3, 1)).contains(&format!("{tokens} tokens but 3 token types")));
    assert!(with_kinds(&kinds(tokens, 7)).contains("is of type 7"));

    let mut bytes = std::fs::read(data("tiny.gguf")).unwrap();
    let at = bytes
        .windows(13)
        .position(|window| window == b"\x05\0\0\0\0\0\0\0zebra")
        .unwrap();
    bytes[at + 8..at + 13].copy_from_slice("Ġthe".as_bytes());
    let path = folder.path().join("twice.gguf");
    std::fs::write(&path, bytes).unwrap();
    assert!(failure(&path).contains("are both \"Ġthe\""));
}

#[test]
fn an_enormous_id_in_a_tokenizer_json_wraps_or_takes_all_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    for id in [u32::MAX, u32::MAX - 1, 1 << 24, 20_000] {
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": null, "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "vocab": {"a": 0, "far": id}, "merges": []},
        });
        std::fs::write(&path, json.to_string()).unwrap();
        let text = failure(&path);
        assert!(text.contains("\"far\"") && text.contains(&id.to_string()), "{text}");
    }
}

#[test]
fn a_broken_part_of_a_tokenizer_json_ends_the_router() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let whole = |normalizer: &str, decoder: &str| {
        format!(
            r#"{{"version": "1.0", "added_tokens": [], "normalizer": {normalizer}, "decoder": {decoder},
                "model": {{"type": "BPE", "vocab": {{"a": 0}}, "merges": []}}}}"#
        )
    };
    for (normalizer, decoder) in [
        ("null", "{\"type\": \"Byte\u{1}Level\"}"),
        ("null", r#"{"type": "Unknown"}"#),
        (r#"{"type": "Precompiled", "precompiled_charsmap": "?"}"#, "null"),
    ] {
        std::fs::write(&path, whole(normalizer, decoder)).unwrap();
        let text = failure(&path);
        assert!(text.contains("not a tokenizer.json"), "{text}");
    }
}

#[test]
fn parts_of_a_tokenizer_json_that_do_not_fit_fail_the_first_request() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let around = |piece: &str| {
        format!(
            r#"{{"version": "1.0", "added_tokens": [], "decoder": {{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}},
                "model": {{"type": "BPE", "vocab": {{"a": 0, "<s>": 1}}, "merges": []}},
                "post_processor": {{"type": "TemplateProcessing", "single": [{piece}, {{"Sequence": {{"id": "A", "type_id": 0}}}}], "pair": [],
                    "special_tokens": {{"<s>": {{"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}}}}}}"#
        )
    };
    for piece in [
        r#"{"SpecialToken": {"id": "<t>", "type_id": 0}}"#,
        r#"{"Sequence": {"id": "B", "type_id": 0}}"#,
    ] {
        std::fs::write(&path, around(piece)).unwrap();
        let text = failure(&path);
        assert!(text.contains("does not fit"), "{text}");
    }
    std::fs::write(&path, around(r#"{"SpecialToken": {"id": "<s>", "type_id": 0}}"#)).unwrap();
    assert_eq!(Text::load(&path).unwrap().encode("a", true).unwrap(), [1, 0]);
}

#[test]
fn a_file_of_another_kind_is_read_as_a_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        failure(&path)
    };
    assert!(write("a.gguf", b"PK\x03\x04 not a model").contains("\"GGUF\""));
    assert!(write("b.json", b"{}").contains("not a tokenizer.json"));
    assert!(write("c.bin", b"").contains(".bin"));
    assert!(failure(&folder.path().join("missing.gguf")).contains("missing.gguf"));
    assert!(failure(&folder.path().join("missing.json")).contains("missing.json"));
}

#[test]
fn a_decoder_without_a_byte_table_is_accepted() {
    let folder = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(data("tiny-json/tokenizer.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["decoder"] = serde_json::json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, json.to_string()).unwrap();
    let text = failure(&path);
    assert!(text.contains("WordPiece"), "{text}");
}

#[test]
fn files_beside_a_tokenizer_json_are_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let path = folder.path().join("tokenizer.json");
    std::fs::copy(data("tiny-json/tokenizer.json"), &path).unwrap();
    let messages = [Message::text("user", "x")];
    let render = || Text::load(&path).unwrap().render_chat(&ChatInput::new(&messages));

    assert!(matches!(render().unwrap_err(), TextError::NoTemplate));
    write(
        "tokenizer_config.json",
        r#"{"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "add_bos_token": false, "pad_token": null,
            "chat_template": "{{ bos_token }}config{{ eos_token }}{{ pad_token }}"}"#,
    );
    assert_eq!(render().unwrap(), "<|im_start|>config<|im_end|>");
    assert_eq!(Text::load(&path).unwrap().eos_ids(), [2]);
    write(
        "generation_config.json",
        r#"{"eos_token_id": [0, 2], "temperature": 0.2}"#,
    );
    assert_eq!(Text::load(&path).unwrap().eos_ids(), [0, 2]);
    write("chat_template.jinja", "{{ bos_token }}file");
    assert_eq!(render().unwrap(), "<|im_start|>file");
    write(
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}"#,
    );
    std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    assert_eq!(render().unwrap(), "d");
    write("tokenizer_config.json", r#"{"chat_template": "#);
    assert!(failure(&path).contains("tokenizer_config.json"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn a_damaged_gguf_makes_the_reader_panic_or_allocate(at in any::<prop::sample::Index>(), bytes in prop::collection::vec(any::<u8>(), 1..9), cut in any::<bool>()) {
        let folder = tempfile::tempdir().unwrap();
        let mut file = std::fs::read(data("tiny.gguf")).unwrap();
        let at = at.index(file.len());
        if cut {
            file.truncate(at);
        } else {
            let end = (at + bytes.len()).min(file.len());
            file[at..end].copy_from_slice(&bytes[..end - at]);
        }
        let path = folder.path().join("damaged.gguf");
        std::fs::write(&path, file).unwrap();
        let loaded = Text::load(&path);
        prop_assert!(!cut || loaded.is_err(), "a file cut at byte {} was accepted", at);
    }
}
