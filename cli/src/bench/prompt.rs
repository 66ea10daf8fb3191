//! Prompts of a given length in tokens, without the server's tokenizer: of words that are one token each in about any
//! vocabulary, as many as the server's own count asks for.

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

/// Common short nouns.
const WORDS: [&str; 64] = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system", "program",
    "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money", "story",
    "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind",
    "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law", "car",
    "city",
];
/// Words of a shared prompt that are a request's own: its last ones.
const OWN_WORDS: usize = 16;

/// Makes the prompts of one run.
#[derive(Debug, Clone)]
pub struct Prompts {
    pub seed: u64,
    pub words: usize,
    /// All but the last words are the same for every request.
    pub shared_prefix: bool,
}

impl Prompts {
    /// The prompt of request `index`: its own from the first word on, unless the prefix is shared.
    pub fn prompt(&self, index: u64) -> String {
        let shared = if self.shared_prefix {
            self.words.saturating_sub(OWN_WORDS)
        } else {
            0
        };
        // The shared part is drawn from the run's seed alone.
        let mut common = StdRng::seed_from_u64(self.seed);
        let mut own = StdRng::seed_from_u64(self.seed ^ (index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let words: Vec<&str> = (0..self.words)
            .map(|at| WORDS[if at < shared { &mut common } else { &mut own }.random_range(0..WORDS.len())])
            .collect();
        words.join(" ")
    }
}

/// How many words make `target` tokens, from the server's counts at two lengths.
///
/// # Errors
/// The server's count does not grow with the words, or the target is less than the fixed part alone.
pub fn words_for(
    target: u64,
    (few, few_tokens): (usize, u64),
    (many, many_tokens): (usize, u64),
) -> Result<usize, String> {
    if many_tokens <= few_tokens || many <= few {
        return Err(format!(
            "the server counts {few_tokens} prompt tokens for {few} words and {many_tokens} for {many}: its usage is \
             no count of tokens"
        ));
    }
    let per_word = (many_tokens - few_tokens) as f64 / (many - few) as f64;
    let fixed = few_tokens as f64 - per_word * few as f64;
    let words = ((target as f64 - fixed) / per_word).round();
    if words < 1.0 {
        return Err(format!(
            "a prompt of {target} tokens is too short: the chat template alone takes about {fixed:.0}; give --prompt-tokens \
             {:.0} or more",
            fixed + per_word
        ));
    }
    Ok(words as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompts(shared_prefix: bool) -> Prompts {
        Prompts {
            seed: 7,
            words: 40,
            shared_prefix,
        }
    }

    fn common_words(a: &str, b: &str) -> usize {
        a.split(' ').zip(b.split(' ')).take_while(|(a, b)| a == b).count()
    }

    #[test]
    fn a_prefix_cache_finds_nothing_unless_asked_for() {
        let own = prompts(false);
        let shared = prompts(true);
        for index in 1..200 {
            assert!(common_words(&own.prompt(0), &own.prompt(index)) < 4);
            let common = common_words(&shared.prompt(0), &shared.prompt(index));
            assert!((24..30).contains(&common), "{common}");
        }
        let other_run = Prompts {
            seed: 8,
            ..prompts(true)
        };
        assert!(
            common_words(&shared.prompt(0), &other_run.prompt(0)) < 4,
            "another run shares nothing"
        );
        assert_eq!(own.prompt(3), prompts(false).prompt(3), "a seed repeats a run");
        assert_eq!(own.prompt(3).split(' ').count(), 40);
    }

    #[test]
    fn the_number_of_words_follows_the_servers_count() {
        assert_eq!(words_for(128, (8, 38), (72, 102)), Ok(98));
        assert_eq!(words_for(100, (8, 26), (72, 154)), Ok(45));
        assert!(
            words_for(20, (8, 38), (72, 102))
                .unwrap_err()
                .contains("--prompt-tokens 31 or more")
        );
        assert!(
            words_for(128, (8, 38), (72, 38))
                .unwrap_err()
                .contains("no count of tokens")
        );
    }
}
