//! What docs/diagnose.md shows of each row, its layers and its verdict, is what is really said, numbers aside. The observations are
//! those of one run: how many requests were caught where differs from run to run.

use std::path::Path;

use tandem_faults::rows::Row;

/// Lines of the example of `row`.
fn example(row: Row) -> Vec<String> {
    let docs = std::fs::read_to_string(tandem_e2e::root().join("docs/diagnose.md")).expect("the page");
    let heading = format!("\n### {}\n", row.name());
    let (_, rest) = docs.split_once(&heading).unwrap_or_else(|| panic!("no{heading}"));
    let own = rest.split("\n## ").next().and_then(|rest| rest.split("\n### ").next());
    let mut parts = own.unwrap_or_default().split("```\n");
    let (_, block) = (parts.next(), parts.next());
    let lines: Vec<String> = block.unwrap_or_default().lines().map(str::to_owned).collect();
    assert!(!lines.is_empty(), "the example of {} is empty", row.name());
    lines
}

/// A line without its numbers, and without how many they were.
fn masked(line: &str) -> String {
    let words: Vec<&str> = line.split_whitespace().collect();
    let mut masked = String::new();
    for c in words.join(" ").chars() {
        let number = c.is_ascii_digit() || (matches!(c, '.' | '\u{2013}') && masked.ends_with('#'));
        match c {
            _ if number && masked.ends_with('#') => {}
            _ if number => masked.push('#'),
            _ => masked.push(c),
        }
    }
    while masked.contains("#, #") {
        masked = masked.replace("#, #", "#");
    }
    masked
}

/// Lines of the example that nobody said; one that ends in `...` is the beginning of a line.
pub fn unsaid(row: Row, text: &str) -> Vec<String> {
    let said: Vec<String> = text.lines().map(masked).collect();
    let mut lines = example(row);
    lines.retain(|line| !is_observation(line));
    lines.retain(|line| {
        let (line, cut) = match line.strip_suffix("...") {
            Some(line) => (line, true),
            None => (line.as_str(), false),
        };
        let line = masked(line);
        !said.iter().any(|said| {
            if cut {
                said.starts_with(line.trim_end())
            } else {
                *said == line
            }
        })
    });
    lines
}

/// Whether a line begins with an observation's number, in its column.
fn is_observation(line: &str) -> bool {
    let number = line.get(..4).map(str::trim_start);
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// What people read of a record.
pub async fn told(whole: &serde_json::Value, tandem: &Path) -> String {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), whole.to_string()).expect("written");
    let mut run = tokio::process::Command::new(tandem);
    let output = run
        .arg("diagnose")
        .arg(format!("--from={}", file.path().display()))
        .output();
    let output = output.await.expect("it starts");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn a_verdict_is_taken_for_an_observation() {
    assert!(is_observation("   3  1 request in state accept") && is_observation("  12  1 probe"));
    assert!(!is_observation("2 client connections closed") && !is_observation("      router      excluded"));
}

#[test]
fn an_example_is_compared_by_its_numbers_or_not_by_its_words() {
    let line = "   3  1 client connection blocked for 5.0\u{2013}21 s  [http://127.0.0.1:80/a] (3, 4)";
    assert_eq!(masked(line), "# # client connection blocked for # s [http://#:#/a] (#)");
    for row in Row::ALL {
        let whole = example(row).join("\n").replace("...", " and so on");
        assert_eq!(unsaid(row, &whole), [""; 0]);
        let other = whole.replace("verdict", "opinion");
        assert_eq!(unsaid(row, &other).len(), 1, "{}: its verdict is not shown", row.name());
    }
}
