//! The pool against a model of it that keeps, for every page, the whole prefix whose KV lies there.

use std::collections::HashSet;
use std::sync::Arc;

use proptest::prelude::*;

use super::pool::{Path, Pool};
use super::{KvCache, PageStats};
use crate::exec::PageId;

const PAGE_TOKENS: u32 = 4;
const PAGES: u32 = 24;

/// A live sequence as its owner sees it.
struct Live {
    tokens: Vec<u32>,
    /// Tokens whose KV was written or matched.
    computed: usize,
    matched: usize,
    total: usize,
    pages: Vec<PageId>,
    path: Path,
}

/// What lies in each page: the tokens of the whole prefix up to its last written one.
struct Model {
    pool: Pool,
    content: Vec<Vec<u32>>,
    live: Vec<Live>,
    /// Every prefix ever published and not flushed with certainty; a hit must be among them.
    published: HashSet<Vec<u32>>,
}

#[derive(Debug, Clone)]
enum Op {
    /// A prompt made of few letters, so that prefixes meet; `grow` tokens more are reserved.
    Reserve {
        prompt: Vec<u32>,
        leave: usize,
        grow: usize,
    },
    /// Computes up to so many tokens, appending new ones after the prompt.
    Compute {
        pick: usize,
        tokens: usize,
        letter: u32,
    },
    Publish {
        pick: usize,
    },
    Drop {
        pick: usize,
    },
    Flush,
    Enable(bool),
}

impl Model {
    fn new() -> Self {
        Self {
            pool: Pool::new(PAGES, PAGE_TOKENS, true),
            content: vec![Vec::new(); PAGES as usize],
            live: Vec::new(),
            published: HashSet::new(),
        }
    }

    fn apply(&mut self, op: Op) {
        let size = PAGE_TOKENS as usize;
        match op {
            Op::Reserve { prompt, leave, grow } => {
                let total = prompt.len() + grow;
                let before = self.pool.stats();
                let matchable = &prompt[..prompt.len() - leave.min(prompt.len())];
                let needed = total.div_ceil(size);
                match self.pool.reserve(matchable, needed) {
                    None => {
                        let after = self.pool.stats();
                        assert_eq!((before.available(), before.held), (after.available(), after.held));
                        assert!(needed > before.available() as usize);
                    }
                    Some((pages, path)) => {
                        let matched = path.depth_tokens(size) as usize;
                        assert!(matched <= matchable.len() && pages.len() == needed);
                        for (i, &page) in pages.iter().enumerate() {
                            let end = (i + 1) * size;
                            if end <= matched {
                                assert!(
                                    self.published.contains(&prompt[..end]),
                                    "a hit on what nobody published"
                                );
                                assert_eq!(
                                    self.content[page as usize],
                                    prompt[..end],
                                    "page {page} holds something else"
                                );
                            } else {
                                assert!(
                                    self.live.iter().all(|l| !l.pages.contains(&page)),
                                    "page {page} is given out while it is held"
                                );
                            }
                        }
                        assert_eq!(pages.iter().collect::<HashSet<_>>().len(), pages.len());
                        self.live.push(Live {
                            tokens: prompt,
                            computed: matched,
                            matched,
                            total,
                            pages,
                            path,
                        });
                    }
                }
            }
            Op::Compute { pick, tokens, letter } => {
                if self.live.is_empty() {
                    return;
                }
                let i = pick % self.live.len();
                for _ in 0..tokens {
                    let live = &mut self.live[i];
                    if live.computed == live.total {
                        break;
                    }
                    if live.computed == live.tokens.len() {
                        live.tokens.push(letter);
                    }
                    let page = live.pages[live.computed / size];
                    assert!(live.computed >= live.matched, "a shared page is written");
                    live.computed += 1;
                    self.content[page as usize] = live.tokens[..live.computed].to_vec();
                    let holders = self.live.iter().filter(|l| l.pages.contains(&page)).count();
                    assert_eq!(holders, 1, "page {page} is written while another sequence reads it");
                }
            }
            Op::Publish { pick } => {
                if self.live.is_empty() {
                    return;
                }
                let i = pick % self.live.len();
                let live = &mut self.live[i];
                self.pool
                    .publish(&live.tokens[..live.computed], &live.pages, &mut live.path);
                for end in (size..=live.computed).step_by(size) {
                    self.published.insert(live.tokens[..end].to_vec());
                }
            }
            Op::Drop { pick } => {
                if !self.live.is_empty() {
                    let live = self.live.swap_remove(pick % self.live.len());
                    self.pool.release(&live.pages, &live.path);
                }
            }
            Op::Flush => {
                let before = self.pool.stats();
                assert_eq!(self.pool.flush(), before.cached);
                assert_eq!(self.pool.stats().cached, 0);
            }
            Op::Enable(enabled) => self.pool.set_enabled(enabled),
        }
        self.pool.check();
    }

    fn end(mut self) {
        for live in self.live.drain(..) {
            self.pool.release(&live.pages, &live.path);
        }
        self.pool.check();
        let stats = self.pool.stats();
        assert_eq!(stats.held, 0);
        self.pool.flush();
        assert_eq!(self.pool.stats().free, PAGES, "a page leaked");
    }
}

fn op() -> impl Strategy<Value = Op> {
    let prompt = prop::collection::vec(0u32..2, 1..40);
    prop_oneof![
        6 => (prompt, 0usize..2, 1usize..12).prop_map(|(prompt, leave, grow)| Op::Reserve { prompt, leave, grow }),
        8 => (any::<usize>(), 1usize..30, 0u32..2).prop_map(|(pick, tokens, letter)| Op::Compute { pick, tokens, letter }),
        6 => any::<usize>().prop_map(|pick| Op::Publish { pick }),
        5 => any::<usize>().prop_map(|pick| Op::Drop { pick }),
        1 => Just(Op::Flush),
        1 => any::<bool>().prop_map(Op::Enable),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4_000, ..ProptestConfig::default() })]

    #[test]
    fn no_order_of_calls_loses_doubles_or_mixes_up_a_page(ops in prop::collection::vec(op(), 1..250)) {
        let mut model = Model::new();
        for op in ops {
            model.apply(op);
        }
        model.end();
    }
}

#[test]
fn a_prefix_is_found_by_its_tokens_and_only_in_whole_pages() {
    let cache = KvCache::new(8, 4, true);
    let first: Vec<u32> = (0..10).collect();
    let pages = cache.reserve(&first, 1, 12).unwrap();
    assert_eq!((pages.cached_tokens(), pages.pages().len()), (0, 3));
    cache.publish(&first, &pages);
    let again = cache.reserve(&first, 1, 10).unwrap();
    assert_eq!(again.cached_tokens(), 8);
    assert_eq!(again.pages()[..2], pages.pages()[..2]);
    assert_ne!(again.pages()[2], pages.pages()[2]);
    let other: Vec<u32> = [0, 1, 2, 3, 4, 5, 6, 9].into();
    assert_eq!(cache.reserve(&other, 0, 8).unwrap().cached_tokens(), 4);
    // all of a prompt may be cached, but then the one who computes its last token gets a page of its own for it
    assert_eq!(cache.reserve(&first[..8], 0, 8).unwrap().cached_tokens(), 8);
    assert_eq!(cache.reserve(&first[..8], 1, 8).unwrap().cached_tokens(), 4);
}

#[test]
fn a_duplicate_stays_its_owners_and_is_freed_once() {
    let cache = KvCache::new(8, 4, true);
    let tokens: Vec<u32> = (0..12).collect();
    let a = cache.reserve(&tokens, 1, 12).unwrap();
    let b = cache.reserve(&tokens, 1, 12).unwrap();
    cache.publish(&tokens[..8], &a);
    cache.publish(&tokens, &b);
    drop(a);
    // b's third page lies below a's first two, which therefore may not be evicted
    assert_eq!(
        cache.stats(),
        PageStats {
            total: 8,
            free: 3,
            cached: 0,
            held: 5
        }
    );
    assert_eq!(cache.reserve(&[7; 16], 1, 16).unwrap_err().available, 3);
    let hit = cache.reserve(&tokens, 0, 12).unwrap();
    assert_eq!(hit.cached_tokens(), 12);
    drop((b, hit));
    assert_eq!(
        cache.stats(),
        PageStats {
            total: 8,
            free: 5,
            cached: 3,
            held: 0
        }
    );
    assert_eq!(cache.flush(), 3);
    assert_eq!(cache.stats().free, 8);
}

#[test]
fn the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning() {
    let cache = KvCache::new(4, 4, true);
    let keep = |tokens: &[u32]| {
        let pages = cache.reserve(tokens, 0, tokens.len()).unwrap();
        cache.publish(tokens, &pages);
    };
    let (old, new): (Vec<u32>, Vec<u32>) = ((0..8).collect(), (100..108).collect());
    keep(&old);
    keep(&new);
    drop(cache.reserve(&old, 0, 8).unwrap());
    let hits = |tokens: &[u32]| cache.reserve(tokens, 0, tokens.len()).unwrap().cached_tokens();
    drop(cache.reserve(&[50; 4], 0, 4).unwrap());
    assert_eq!(
        (hits(&old), hits(&new[..4])),
        (8, 4),
        "the end of the older one goes first"
    );
}

#[test]
fn pages_are_free_only_after_the_last_copy_of_their_handle() {
    let cache = KvCache::new(4, 4, false);
    let pages = Arc::new(cache.reserve(&[1; 8], 0, 16).unwrap());
    let copy = Arc::clone(&pages);
    drop(pages);
    assert_eq!(cache.stats().free, 0);
    assert!(cache.reserve(&[1], 0, 1).is_err());
    drop(copy);
    assert_eq!(
        cache.stats(),
        PageStats {
            total: 4,
            free: 4,
            cached: 0,
            held: 0
        }
    );
}

#[test]
fn a_cache_that_is_switched_off_keeps_and_finds_nothing() {
    let cache = KvCache::new(8, 4, true);
    let tokens: Vec<u32> = (0..8).collect();
    let early = cache.reserve(&tokens, 0, 8).unwrap();
    cache.publish(&tokens, &early);
    cache.set_enabled(false);
    assert_eq!(cache.reserve(&tokens, 0, 8).unwrap().cached_tokens(), 0);
    drop(early);
    assert_eq!(cache.stats().free, 8);
}
