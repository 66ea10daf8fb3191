//! The choice among engines of one side. Pure: chance and turn come from the caller.

use std::time::Instant;

use crate::knobs::Policy;

/// One engine that is up.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a, T> {
    /// The engine.
    pub what: &'a T,
    /// Has it room now? If not, when to look again, where that is known.
    pub room: Result<(), Option<Instant>>,
    /// Share of its room that is taken, 0 to 1 and above.
    pub load: f32,
    /// This request failed on it before.
    pub avoided: bool,
    /// It has the request's prompt.
    pub preferred: bool,
}

/// The outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chosen {
    /// This candidate.
    One(usize),
    /// None has room; look again at that time, if not told of a change before.
    Full(Option<Instant>),
}

/// Chooses among those with room: the preferred one, and one that was avoided only if no other has room.
pub fn choose<T>(
    policy: Policy,
    candidates: &[Candidate<'_, T>],
    turn: impl FnOnce() -> u64,
    mut chance: impl FnMut() -> u32,
) -> Chosen {
    let with_room = |avoided: bool| -> Vec<usize> {
        (0..candidates.len())
            .filter(|&at| candidates[at].room.is_ok() && candidates[at].avoided == avoided)
            .collect()
    };
    let mut open = with_room(false);
    if open.is_empty() {
        open = with_room(true);
    }
    if let Some(&at) = open.iter().find(|&&at| candidates[at].preferred) {
        return Chosen::One(at);
    }
    match open.len() {
        0 => Chosen::Full(candidates.iter().filter_map(|c| c.room.err().flatten()).min()),
        1 => Chosen::One(open[0]),
        n => Chosen::One(match policy {
            Policy::RoundRobin => open[(turn() % n as u64) as usize],
            Policy::LeastLoaded => {
                let first = chance() as usize % n;
                // another than the first, each with the same chance
                let second = (first + 1 + chance() as usize % (n - 1)) % n;
                let (first, second) = (open[first], open[second]);
                if candidates[second].load < candidates[first].load {
                    second
                } else {
                    first
                }
            }
        }),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn candidate(room: bool, load: f32, avoided: bool) -> Candidate<'static, ()> {
        Candidate {
            what: &(),
            room: if room { Ok(()) } else { Err(None) },
            load,
            avoided,
            preferred: false,
        }
    }

    #[test]
    fn the_preferred_one_is_passed_over_or_taken_without_room_or_where_it_failed() {
        let mut candidates = [
            candidate(true, 0.1, false),
            candidate(true, 0.9, false),
            candidate(true, 0.1, false),
        ];
        candidates[1].preferred = true;
        let choose = |candidates: &[_]| choose(Policy::LeastLoaded, candidates, || 0, || 0);
        assert_eq!(choose(&candidates), Chosen::One(1));
        for spoil in [
            |c: &mut Candidate<'_, ()>| c.avoided = true,
            |c: &mut Candidate<'_, ()>| {
                c.room = Err(None);
            },
        ] {
            let mut spoilt = candidates;
            spoil(&mut spoilt[1]);
            assert_ne!(choose(&spoilt), Chosen::One(1));
        }
    }

    #[test]
    fn round_robin_takes_turns_over_those_with_room() {
        let candidates = [
            candidate(true, 0.9, false),
            candidate(false, 0.0, false),
            candidate(true, 0.0, false),
        ];
        let order: Vec<_> = (0..4)
            .map(|turn| choose(Policy::RoundRobin, &candidates, || turn, || 0))
            .collect();
        assert_eq!(order, [0, 2, 0, 2].map(Chosen::One));
    }

    #[test]
    fn of_two_drawn_the_less_loaded_is_taken() {
        let candidates = [candidate(true, 0.9, false), candidate(true, 0.1, false)];
        for seed in 0..10 {
            assert_eq!(choose(Policy::LeastLoaded, &candidates, || 0, || seed), Chosen::One(1));
        }
    }

    #[test]
    fn nobody_with_room_says_when_to_look_again() {
        let now = Instant::now();
        let mut early = candidate(false, 1.0, false);
        early.room = Err(Some(now));
        let candidates = [candidate(false, 1.0, false), early];
        assert_eq!(
            choose(Policy::LeastLoaded, &candidates, || 0, || 0),
            Chosen::Full(Some(now))
        );
    }

    proptest! {
        #[test]
        fn no_policy_takes_one_without_room_or_an_avoided_one_needlessly(
            shape in prop::collection::vec((any::<bool>(), 0f32..2.0, any::<bool>()), 1..8),
            turn: u64, chance in prop::collection::vec(any::<u32>(), 2), least: bool,
        ) {
            let candidates: Vec<_> = shape.iter().map(|&(r, l, a)| candidate(r, l, a)).collect();
            let policy = if least { Policy::LeastLoaded } else { Policy::RoundRobin };
            let mut draws = chance.into_iter();
            match choose(policy, &candidates, || turn, || draws.next().unwrap()) {
                Chosen::One(at) => {
                    prop_assert!(candidates[at].room.is_ok());
                    let better = candidates.iter().any(|c| c.room.is_ok() && !c.avoided);
                    prop_assert!(!candidates[at].avoided || !better);
                }
                Chosen::Full(_) => prop_assert!(candidates.iter().all(|c| c.room.is_err())),
            }
        }
    }
}
