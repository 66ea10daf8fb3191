#!/usr/bin/env python3
"""Makes the small tokenizers of tests/data and the ids that reference implementations give for a corpus of strings.

    pip install tokenizers==0.22.2 [llama-cpp-python]
    python3 router/tests/golden/ids.py [SmolLM2-135M-Instruct.gguf]

Writes tests/data/tiny.gguf (byte-level BPE of a few hundred tokens, tensors left out), tiny-json/tokenizer.json (the same, as
Hugging Face writes it), pieces-json/tokenizer.json (sentencepiece-like), strings.json, and ids.json: per tokenizer the ids of each string.

Expected ids are those of the Hugging Face wheel with the pre-tokenizer that each model family publishes. Where llama-cpp-python can be
imported every list is compared with llama.cpp's too, and each difference must be one that the function `known_difference` explains.
"""

import json
import struct
import sys
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

DATA = Path(__file__).parent.parent / "data"

TEXT = """
The quick brown fox jumps over the lazy dog, and the dog doesn't mind: it's asleep. We'll see whether they've noticed; I'd guess not!
Numbers such as 7, 42, 365, 2026 and 3.14159 appear in prices ($19.99), dates (2026-07-04) and versions (v1.2.3-rc1).
def encode(text: str) -> list[int]:
    return [token for token in tokenize(text) if token is not None]  # keep order
for (let i = 0; i < items.length; i++) { total += items[i].price * 1.2; }
SELECT name, count(*) FROM requests WHERE status >= 500 GROUP BY name;
Über den Wolken muss die Freiheit wohl grenzenlos sein; où est la bibliothèque? ¿Dónde está el señor Núñez?
你好，世界。今天天气很好，我们去公园吧。東京は日本の首都です。こんにちは世界。한국어 문장도 있습니다.
Привет, мир! Как дела? Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया। สวัสดีชาวโลก
A server reads the request, renders the template, encodes the prompt, and streams the answer token by token until it stops.
"""

# As the models' own tokenizer.json has them.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What llama.cpp does for files that say `default`; no model publishes it.
DEFAULT = [
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
]


def split(*patterns):
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def families():
    """Per GGUF name: pre-tokenizer, normalizer, ignore_merges."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return {
        "gpt-2": (byte_level, None, False),
        "smollm": (digits, None, False),
        "llama-bpe": (split(LLAMA3), None, True),
        "qwen2": (split(QWEN2), normalizers.NFC(), False),
        "tekken": (split(TEKKEN), None, True),
        "default": (split(*DEFAULT), None, False),
    }


def build(vocab, merges, special, user_defined, pre, normalizer, ignore_merges):
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in user_defined])
    return tokenizer


def strings():
    """Words, numbers, blanks, controls, scripts, marks, emoji, and seeded mixtures of them."""
    fixed = [
        "", " ", "  ", "   a", "a   ", "\n", "\n\n", " \n", "\n ", "\r\n", "\r\n\r\n", "a\r\nb", "\t", "\ta\t\tb", " \t \n \t ", "\u00a0", "\u3000x",
        "a\u000bb\u000cc", "\u0085", "\u2028\u2029", "\u200b", "\ufeff", "\u0000", "\u0001\u001f\u007f",
        "Hello", "Hello, world!", "hello world", " Hello", "HELLO", "zebra", "a zebra zebras", "(zebra)", "HelloWorld", "helloWORLDfoo", "snake_case_name", "kebab-case-name", "CamelCaseXMLParser",
        "it's", "It'S", "they'Ve we'LL I'd", "don’t", "'s", "''''", "x'tx", "'re 'RE '", "rock 'n' roll's",
        "0", "7", "42", "365", "2026", "12345", "1234567890", "3.14159", "1,000,000", "$19.99", "v1.2.3-rc1", "2026-07-04T09:05:03Z", "a1b22c333", "٣٤٥", "Ⅷ Ⅻ ½ ² ①",
        "!", "!!!", "?!...", "(a)[b]{c}<d>", "a/b//c", "https://example.org/a?b=c&d=%20#e", "\\n \\\\", "`code` **bold** __u__", "@user #tag", "€£¥₹", "+-*/=<>^~|", "“quotes” ‘x’ —–…",
        "def f(x):\n    return x\n\n\n# end", "    indented\n        more\n\ttab", "if (a && b) { c++; }\n", '{"k": [1, 2.5, null, true], "s": "a\\"b"}', "<div class=\"x\">\n  y\n</div>",
        "Über", "naïve café", "où est-ce?", "¿Dónde?", "Straße", "ﬁ ﬂ", "e\u0301 é", "a\u0300\u0301\u0302b", "A\u030a Å \u212b", "ñ n\u0303",
        "你好，世界。", "東京は日本の首都です", "こんにちは", "한국어 문장", "각 \u1100\u1161\u11a8", "中英mixed混合text", "。。。", "１２３ＡＢＣ",
        "Привет, мир!", "Γειά σου", "שלום עולם", "مرحبا بالعالم", "नमस्ते दुनिया", "สวัสดี", "தமிழ்", "Việt Nam đẹp", "ქართული", "ǅ ǈ ʰ ª",
        "🙂", "🙂🙂", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇫🇷🇩🇪", "1️⃣", "a🙂b", "❤️ ok", "\U0001f9d1\u200d\U0001f680",
        "<|im_start|>", "<|im_start|>user\nHi<|im_end|>\n", "<|im_end|><|im_end|>", " <|im_start|> ", "<|im_start", "a<|endoftext|>b", "<tool>x</tool>", "<too l>", "é<tool>é",
        "\ue000\uf8ff", "\u0378", "\uffff", "ⅰ", "x" * 60, " " * 40, "\n" * 12, "ab" * 30, "1" * 25, "!" * 33, "é" * 20, "字" * 20, "🙂" * 10, ("word " * 12).strip(),
    ]
    seed = 12345

    def random(n):
        nonlocal seed
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        return (seed >> 33) % n

    parts = ["the", " The", "'s", "'LL", " ", "  ", "\n", "\r\n", "\t", "7", "42", "2026", "é", "e\u0301", "Ü", "你", "好，", "は", "한", "🙂", "👩‍👧", "‍", "\u0301", ".", ",", "!!", "(", "_", "/", "=>", "ab", "XY", "q", "ß", "\u00a0", "\u200b", "<|im_end|>", "<", "|", "#"]
    mixed = ["".join(parts[random(len(parts))] for _ in range(1 + random(14))) for _ in range(90)]
    return fixed + mixed


def gguf_value(value):
    text = lambda s: struct.pack("<Q", len(s.encode())) + s.encode()
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    kind, body = (8, b"".join(map(text, value))) if isinstance(value[0], str) else (5, struct.pack(f"<{len(value)}i", *value))
    return struct.pack("<IIQ", 9, kind, len(value)) + body


def write_gguf(path, metadata):
    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, len(metadata))
    pairs = b"".join(struct.pack("<Q", len(key)) + key.encode() + gguf_value(value) for key, value in metadata.items())
    path.write_bytes(head + pairs)


def read_gguf(path):
    data, at = path.read_bytes()[: 64 << 20], 4

    def take(form):
        nonlocal at
        value = struct.unpack_from("<" + form, data, at)[0]
        at += struct.calcsize("<" + form)
        return value

    def value(kind):
        nonlocal at
        if kind == 8:
            size = take("Q")
            at += size
            return data[at - size : at].decode()
        if kind == 9:
            inner, count = take("I"), take("Q")
            return [value(inner) for _ in range(count)]
        return take({0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}[kind])

    take("I"), take("Q")
    return {value(8): value(take("I")) for _ in range(take("Q"))}


def tiny():
    """A small vocabulary with every byte, special tokens in front and behind, and a token that users may write."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(TEXT.splitlines(), trainers.BpeTrainer(vocab_size=520, initial_alphabet=alphabet, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    words = sorted(model["vocab"], key=model["vocab"].get)
    words.append("zebra")  # no merge leads to it: a token only where whole words go before merges
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *words, "<tool>", "</tool>"]
    kinds = [3, 3, 3, *[1] * len(words), 4, 4]
    return {
        "general.architecture": "llama",
        "general.name": "Tiny",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": (DATA / "templates/chatml.jinja").read_text(),
    }


def pieces():
    """Sentencepiece-like: a mark for spaces, a space put in front, bytes as tokens."""
    tokenizer = Tokenizer(BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[*specials, *(f"<0x{byte:02X}>" for byte in range(256))], limit_alphabet=80, show_progress=False)
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    saved = json.loads(tokenizer.to_str())
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["content"] in specials]
    saved["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    saved["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    return saved


def from_metadata(metadata, family):
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    pick = lambda kind: [token for token, of in zip(tokens, kinds) if of == kind]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    return build(vocab, merges, pick(3), pick(4), *families()[family])


def llama_ids(metadata, family, texts):
    import llama_cpp

    keep = {key: value for key, value in metadata.items() if key.startswith("tokenizer.") and key != "tokenizer.chat_template"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.gguf"
        write_gguf(path, {"general.architecture": "llama", **keep, "tokenizer.ggml.pre": family})
        model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        return [model.tokenize(text.encode(), add_bos=False, special=True) for text in texts]


# Reasons, not strings: a difference that none of these explains fails the run.
def known_difference(family, text, missing):
    import unicodedata

    if family == "qwen2" and unicodedata.normalize("NFC", text) != text:
        return "llama.cpp does not normalize to NFC as Qwen's tokenizer does"
    if family == "tekken" and any(unicodedata.category(character).startswith("M") for character in text):
        return "llama.cpp's pattern for Tekken leaves marks out"
    if any(byte in missing for byte in text.encode()):
        return "a byte without a token: Hugging Face drops it"
    return None


def main():
    texts = strings()
    (DATA / "strings.json").write_text(json.dumps(texts, ensure_ascii=True, indent=0) + "\n")
    sources = {"tiny": tiny()}
    write_gguf(DATA / "tiny.gguf", sources["tiny"])
    hf = from_metadata(sources["tiny"], "smollm")
    (DATA / "tiny-json").mkdir(exist_ok=True)
    (DATA / "tiny-json/tokenizer.json").write_text(hf.to_str() + "\n")
    (DATA / "pieces-json").mkdir(exist_ok=True)
    saved = pieces()
    (DATA / "pieces-json/tokenizer.json").write_text(json.dumps(saved) + "\n")
    wanted = [("tiny", family) for family in families()]
    if len(sys.argv) > 1:
        sources["smollm2"] = read_gguf(Path(sys.argv[1]))
        wanted.append(("smollm2", "smollm"))

    ids = {}
    for source, family in wanted:
        metadata = sources[source]
        tokenizer = from_metadata(metadata, family)
        ids[f"{source} {family}"] = lists = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        try:
            other = llama_ids(metadata, family, texts)
        except ImportError:
            print(f"{source} {family}: llama-cpp-python is not here, not compared")
            continue
        tokens = set(metadata["tokenizer.ggml.tokens"])
        alphabet = dict(zip(range(256), byte_alphabet()))
        missing = {byte for byte, character in alphabet.items() if character not in tokens}
        reasons = {}
        for text, ours, theirs in zip(texts, lists, other):
            if ours != theirs:
                reason = known_difference(family, text, missing) or f"UNEXPLAINED {text!r} {ours} {theirs}"
                reasons[reason] = reasons.get(reason, 0) + 1
        print(f"{source} {family}: {len(texts)} strings, differing from llama.cpp: {reasons or 'none'}")
        if any(reason.startswith("UNEXPLAINED") for reason in reasons):
            sys.exit(1)

    pieces_tokenizer = Tokenizer.from_str(json.dumps(saved))
    pieces_tokenizer.no_truncation()
    ids["pieces"] = [pieces_tokenizer.encode(text).ids for text in texts]
    decoded = {"pieces": [pieces_tokenizer.decode(list_, skip_special_tokens=True) for list_ in ids["pieces"]]}
    lines = ",\n".join(f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(l, separators=(",", ":")) for l in lists) + "\n]" for name, lists in ids.items())
    (DATA / "ids.json").write_text("{\n" + lines + "\n}\n")
    (DATA / "decoded.json").write_text(json.dumps(decoded, indent=0) + "\n")


def byte_alphabet():
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


if __name__ == "__main__":
    main()
