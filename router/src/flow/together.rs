//! Several choices of one prompt: the first hands the prompt over, the others follow it to the same engines, whose prefix
//! caches then hold the prompt's whole pages.

use tokio::sync::watch;

use crate::engines::Prefer;

/// Which part a choice has.
#[derive(Debug)]
pub enum Part {
    /// The only one of its prompt.
    Alone,
    /// The first of several.
    Leads(Lead),
    /// One that waits for the first.
    Follows(Follow),
}

/// Tells the others where the prompt is. Dropped without a word, it lets them go wherever they can.
#[derive(Debug)]
pub struct Lead(watch::Sender<Option<Prefer>>);

/// Waits for the first.
#[derive(Debug)]
pub struct Follow(watch::Receiver<Option<Prefer>>);

impl Part {
    /// The parts of `choices` choices of one prompt.
    pub fn of(choices: usize) -> Vec<Self> {
        if choices == 1 {
            return vec![Self::Alone];
        }
        let (lead, follow) = watch::channel(None);
        let followers = (1..choices).map(|_| Self::Follows(Follow(follow.clone())));
        std::iter::once(Self::Leads(Lead(lead))).chain(followers).collect()
    }

    /// Whom to wait for, the first time.
    pub fn follow(&mut self) -> Option<Follow> {
        match std::mem::replace(self, Self::Alone) {
            Self::Follows(follow) => Some(follow),
            other => {
                *self = other;
                None
            }
        }
    }

    /// The prompt is there.
    pub fn arrived(&mut self, prefer: impl FnOnce() -> Prefer) {
        if let Self::Leads(lead) = std::mem::replace(self, Self::Alone) {
            lead.0.send_replace(Some(prefer()));
        }
    }
}

impl Follow {
    /// Where the prompt is, once it is there; nowhere in particular if the first has ended without a word.
    pub async fn turn(mut self) -> Prefer {
        let arrived = self.0.wait_for(Option::is_some).await;
        arrived.ok().and_then(|arrived| *arrived).unwrap_or_default()
    }
}

/// The seed of choice number `choice`: the request's own for the first, another for each of the others.
pub fn seed(seed: u64, choice: usize) -> u64 {
    if choice == 0 {
        return seed;
    }
    // SplitMix64: seeds next to each other give draws that have nothing in common
    let mut mixed = seed.wrapping_add((choice as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn two_choices_draw_the_same() {
        assert_eq!(seed(7, 0), 7);
        let seeds: BTreeSet<_> = (0..4)
            .flat_map(|own| (0..128).map(move |choice| seed(own, choice)))
            .collect();
        assert_eq!(seeds.len(), 4 * 128);
    }

    #[tokio::test]
    async fn who_follows_one_that_ended_without_a_word_waits_for_ever() {
        let mut parts = Part::of(2);
        let Some(Part::Follows(follow)) = parts.pop() else {
            panic!("no follower")
        };
        drop(parts);
        assert_eq!(follow.turn().await, Prefer::default());
    }
}
