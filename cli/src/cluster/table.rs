//! What people read: columns, and how long ago something was, as kubectl shows them.

use std::fmt::Write as _;

use jiff::Timestamp;

/// Between columns.
const GAP: usize = 3;

/// Rows with their cells below each other; each line begins with `indent`.
pub fn columns(indent: &str, rows: &[Vec<String>]) -> String {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..count).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = indent.to_owned();
        for (cell, width) in row.iter().zip(&widths) {
            let _ = write!(line, "{cell:<width$}", width = width + GAP);
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// `119s`, `9m58s`, `179m`, `7h59m`, `47h`, `7d23h`, `400d`.
pub fn span(seconds: i64) -> String {
    let seconds = seconds.max(0);
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    let two = |first: i64, unit: &str, second: i64, below: &str| match second {
        0 => format!("{first}{unit}"),
        _ => format!("{first}{unit}{second}{below}"),
    };
    match seconds {
        0..120 => format!("{seconds}s"),
        120..600 => two(minutes, "m", seconds % 60, "s"),
        600..10_800 => format!("{minutes}m"),
        10_800..28_800 => two(hours, "h", minutes % 60, "m"),
        28_800..172_800 => format!("{hours}h"),
        172_800..691_200 => two(days, "d", hours % 24, "h"),
        _ => format!("{days}d"),
    }
}

/// How long ago that was.
pub fn age(at: Timestamp) -> String {
    span(Timestamp::now().duration_since(at).as_secs())
}

/// What is shown where nothing is there.
pub fn or_none(text: &str) -> String {
    if text.is_empty() { "<none>" } else { text }.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_not_those_of_kubectl() {
        for (seconds, shown) in [
            (-5, "0s"),
            (119, "119s"),
            (120, "2m"),
            (598, "9m58s"),
            (600, "10m"),
            (10_799, "179m"),
            (10_800, "3h"),
            (28_799, "7h59m"),
            (28_800, "8h"),
            (172_799, "47h"),
            (172_800, "2d"),
            (691_199, "7d23h"),
            (34_560_000, "400d"),
        ] {
            assert_eq!(span(seconds), shown);
        }
    }

    #[test]
    fn cells_of_a_column_stand_at_different_places() {
        let rows = [["NAME", "STEP"], ["chat", "Settled"], ["a-long-name", ""]];
        let rows = rows.map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(
            columns("  ", &rows),
            "  NAME          STEP\n  chat          Settled\n  a-long-name\n"
        );
    }
}
