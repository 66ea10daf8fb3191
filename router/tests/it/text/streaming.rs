//! Streamed text is the whole decode up to the first stop string, however the tokens come.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use tandem_router::text::TextStream;

use super::TINY;

/// Pieces with every kind of trouble: bytes that are spread over tokens, marks, joiners, invalid bytes, control tokens.
fn pieces() -> impl Strategy<Value = Vec<u32>> {
    let texts = select(vec![
        "the ",
        "stop",
        " a",
        "\n",
        "é",
        "e\u{301}",
        "ü",
        "你好",
        "。",
        "は",
        "각",
        "🙂",
        "👩\u{200d}👩\u{200d}👧",
        "🏳️\u{200d}🌈",
        "\u{200d}",
        "\u{301}",
        "\u{fffd}",
        "\u{10ffff}",
        "\u{0}",
        "<|im_end|>",
        "<tool>",
        "END",
        "ENDED",
    ])
    .prop_map(|text| TINY.encode_chat(text).unwrap());
    // each byte a token of its own, so that characters are cut everywhere
    let bytes = "[a-c🙂é你\u{301}]{1,3}".prop_map(|text| text.bytes().map(byte_id).collect());
    let invalid = vec(any::<u8>(), 1..4).prop_map(|bytes| bytes.into_iter().map(byte_id).collect());
    let any_ids = vec(0..TINY.vocabulary().len() as u32, 1..4);
    let piece = prop_oneof![4 => texts, 3 => bytes, 1 => invalid, 1 => any_ids];
    vec(piece, 0..20).prop_map(|pieces: Vec<Vec<u32>>| pieces.concat())
}

/// The id that stands for one byte.
fn byte_id(byte: u8) -> u32 {
    let mut ids =
        (0..TINY.vocabulary().len() as u32).filter(|&id| TINY.vocabulary().token(id).unwrap() == (&[byte], false));
    ids.next().unwrap()
}

/// Where a stop string of a test comes from.
#[derive(Debug, Clone)]
enum Stop {
    /// Characters of the text, begin and length chosen.
    Of(Index, usize),
    /// As before with the last character replaced: begins like the text and does not complete.
    Almost(Index, usize),
    Fixed(&'static str),
}

fn stops() -> impl Strategy<Value = Vec<Stop>> {
    let stop = prop_oneof![
        3 => (any::<Index>(), 1usize..7).prop_map(|(at, length)| Stop::Of(at, length)),
        2 => (any::<Index>(), 1usize..7).prop_map(|(at, length)| Stop::Almost(at, length)),
        1 => select(vec!["END", "ENDED", "nope", "\u{fffd}", "é", "\u{301}", "🙂🙂"]).prop_map(Stop::Fixed),
    ];
    vec(stop, 0..4)
}

fn stop_strings(stops: &[Stop], text: &str) -> Vec<String> {
    let characters: Vec<char> = text.chars().collect();
    let part = |at: &Index, length: usize| -> String {
        if characters.is_empty() {
            "x".into()
        } else {
            characters
                .iter()
                .skip(at.index(characters.len()))
                .take(length)
                .collect()
        }
    };
    stops
        .iter()
        .map(|stop| match stop {
            Stop::Of(at, length) => part(at, *length),
            Stop::Almost(at, length) => part(at, *length) + "§",
            Stop::Fixed(text) => (*text).to_owned(),
        })
        .collect()
}

/// The definition: of all matches the one that begins first ends the text.
fn first_stop(text: &str, stops: &[String]) -> Option<usize> {
    stops.iter().filter_map(|stop| text.find(stop.as_str())).min()
}

/// How much of a text that may go on can be shown: up to the first place where a stop string stands or may yet stand.
fn certain(text: &str, stops: &[String]) -> usize {
    let may_stop = |at: usize| {
        let rest = &text[at..];
        !rest.is_empty()
            && stops
                .iter()
                .any(|stop| rest.starts_with(stop.as_str()) || stop.starts_with(rest))
    };
    text.char_indices()
        .map(|(at, _)| at)
        .find(|&at| may_stop(at))
        .unwrap_or(text.len())
}

/// Complete characters of the ids so far: what waits for more bytes is left out.
fn characters_so_far(ids: &[u32]) -> String {
    let mut bytes = Vec::new();
    for &id in ids {
        let (token, special) = TINY.vocabulary().token(id).unwrap();
        if !special {
            bytes.extend_from_slice(token);
        }
    }
    let waiting = (1..=3).rev().filter(|&tail| tail <= bytes.len()).find(|&tail| {
        let tail = &bytes[bytes.len() - tail..];
        std::str::from_utf8(tail).is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
    });
    bytes.truncate(bytes.len() - waiting.unwrap_or(0));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The definition: where the tokens begin that have a part in `text`, or that stand in it without any text of their own.
fn begins(ids: &[u32], text: &str, stopped: bool) -> Vec<usize> {
    let mut begins = Vec::new();
    let mut so_far = String::new();
    for taken in 1..=ids.len() {
        let begin = so_far.len();
        so_far = characters_so_far(&ids[..taken]);
        let open = TINY.decode(&ids[..taken], true).unwrap().len() > so_far.len();
        let end = so_far.len() + usize::from(open);
        if !stopped || end <= text.len() || begin < text.len() {
            begins.push(so_far[..begin].chars().count());
        }
    }
    begins
}

struct Streamed {
    text: String,
    stopped: Option<String>,
    tokens: usize,
    /// Where the tokens begin that went out with some text.
    begins: Vec<usize>,
}

/// Streams `ids` in groups that end at `cuts`.
fn stream(stream: TextStream, ids: &[u32], cuts: &[usize]) -> Streamed {
    let mut stream = stream.with_places(true);
    let (mut text, mut begins) = (String::new(), Vec::new());
    let mut stopped = None;
    let mut from = 0;
    for &to in cuts.iter().chain([&ids.len()]) {
        let delta = stream.push(&ids[from..to]).unwrap();
        assert!(stopped.is_none() || delta.text.is_empty(), "text after a stop string");
        text.push_str(delta.text);
        begins.extend_from_slice(delta.begins);
        let shown = text.chars().count();
        assert!(begins.iter().all(|&begin| begin <= shown), "a token before its text");
        stopped = delta.stopped.map(str::to_owned);
        from = to;
    }
    let end = stream.finish();
    text.push_str(end.text);
    begins.extend_from_slice(end.begins);
    stopped = stopped.or(end.stopped.map(str::to_owned));
    Streamed {
        text,
        stopped,
        tokens: stream.tokens(),
        begins,
    }
}

fn sorted_cuts(cuts: &[Index], length: usize) -> Vec<usize> {
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(length + 1)).collect();
    cuts.sort_unstable();
    cuts
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn deltas_are_not_the_whole_decode_up_to_the_first_stop(ids in pieces(), stops in stops(), cuts in vec(any::<Index>(), 0..12)) {
        let whole = TINY.decode(&ids, true).unwrap();
        let stops = stop_strings(&stops, &whole);
        let end = first_stop(&whole, &stops);
        let cuts = sorted_cuts(&cuts, ids.len());
        let got = stream(TINY.stream(&stops).unwrap(), &ids, &cuts);
        prop_assert_eq!(&got.text, &whole[..end.unwrap_or(whole.len())]);
        prop_assert_eq!(got.stopped.is_some(), end.is_some());
        if let (Some(stop), Some(end)) = (&got.stopped, end) {
            prop_assert!(whole[end..].starts_with(stop.as_str()));
        }
        // token by token gives the same text, stop string and count
        let each: Vec<usize> = (0..ids.len()).collect();
        let single = stream(TINY.stream(&stops).unwrap(), &ids, &each);
        prop_assert_eq!((&single.text, &single.stopped, single.tokens), (&got.text, &got.stopped, got.tokens));
        prop_assert!(got.tokens == ids.len() || got.stopped.is_some());
        prop_assert_eq!(&single.begins, &got.begins);
        prop_assert_eq!(&got.begins, &begins(&ids, &whole[..end.unwrap_or(whole.len())], got.stopped.is_some()));
    }

    #[test]
    fn text_leaks_early_or_is_held_back_without_need(ids in pieces(), stops in stops()) {
        let whole = TINY.decode(&ids, true).unwrap();
        let stops = stop_strings(&stops, &whole);
        let mut stream = TINY.stream(&stops).unwrap();
        let mut shown = String::new();
        for taken in 1..=ids.len() {
            let delta = stream.push(&ids[taken - 1..taken]).unwrap();
            shown.push_str(delta.text);
            let so_far = characters_so_far(&ids[..taken]);
            if delta.stopped.is_some() {
                prop_assert_eq!(&shown, &so_far[..first_stop(&so_far, &stops).unwrap()]);
                break;
            }
            prop_assert_eq!(&shown, &so_far[..certain(&so_far, &stops)]);
        }
    }
}

#[test]
fn a_stop_string_cut_in_two_anywhere_is_missed() {
    let stop = "STOP 你🙂e\u{301}";
    let text = format!("before {stop} after");
    let ids: Vec<u32> = text.bytes().map(byte_id).collect();
    for first in 0..ids.len() {
        for second in first..ids.len() {
            let got = stream(TINY.stream(&[stop.to_owned()]).unwrap(), &ids, &[first, second]);
            assert_eq!((got.text.as_str(), got.stopped.as_deref()), ("before ", Some(stop)));
            assert_eq!(
                got.tokens,
                "before ".len() + stop.len(),
                "the ids after the stop string do not count"
            );
        }
    }
}

#[test]
fn a_match_inside_a_longer_one_that_began_before_wins() {
    let stops = ["bc".to_owned(), "abcd".to_owned()];
    let ids = |text: &str| text.bytes().map(byte_id).collect::<Vec<_>>();
    for (text, shown, stopped) in [("xabcde", "x", "abcd"), ("xabcxx", "xa", "bc"), ("xabc", "xa", "bc")] {
        for cut in 0..text.len() {
            let got = stream(TINY.stream(&stops).unwrap(), &ids(text), &[cut]);
            assert_eq!(
                (got.text.as_str(), got.stopped.as_deref()),
                (shown, Some(stopped)),
                "{text} cut at {cut}"
            );
        }
    }
}

#[test]
fn which_of_two_stops_at_one_place_is_met_depends_on_the_cut() {
    let stops = ["abc".to_owned(), "ab".to_owned()];
    let ids: Vec<u32> = "xabc".bytes().map(byte_id).collect();
    for cut in 0..ids.len() {
        let got = stream(TINY.stream(&stops).unwrap(), &ids, &[cut]);
        assert_eq!(
            (got.text.as_str(), got.stopped.as_deref(), got.tokens),
            ("x", Some("ab"), 3),
            "cut at {cut}"
        );
    }
    // both complete within one token
    let ids = TINY.encode_chat(" the").unwrap();
    assert_eq!(ids.len(), 1);
    let got = stream(TINY.stream(&["the".into(), "t".into()]).unwrap(), &ids, &[]);
    assert_eq!(got.stopped.as_deref(), Some("t"));
}

#[test]
fn special_tokens_show_unasked_or_stay_hidden_when_asked_for() {
    let ids = TINY.encode_chat("<|im_start|>a<tool><|im_end|>").unwrap();
    let got = stream(TINY.stream(&[]).unwrap(), &ids, &[]);
    assert_eq!(
        (got.text.as_str(), got.tokens),
        ("a<tool>", ids.len()),
        "hidden ids count for usage"
    );
    let got = stream(TINY.stream(&[]).unwrap().with_special_tokens(true), &ids, &[1, 2]);
    assert_eq!(got.text, "<|im_start|>a<tool><|im_end|>");
}

#[test]
fn an_id_beyond_the_vocabulary_is_taken_for_nothing() {
    let beyond = TINY.vocabulary().len() as u32;
    let error = TINY.stream(&[]).unwrap().push(&[beyond]).unwrap_err();
    assert!(error.to_string().contains(&format!("token id {beyond} ")), "{error}");
    assert!(!error.is_request_fault());
}
