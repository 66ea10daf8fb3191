//! The shared face of the pool: one short lock, reservations that are all or nothing, pages that free themselves.

use std::fmt;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::pool::{Path, Pool};
use crate::exec::PageId;

/// Pages by state; `free + cached + held = total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PageStats {
    /// All pages.
    pub total: u32,
    /// Pages that hold nothing.
    pub free: u32,
    /// Pages that hold a cached prefix and that nobody uses.
    pub cached: u32,
    /// Pages in use.
    pub held: u32,
}

impl PageStats {
    /// What a reservation can get.
    pub fn available(&self) -> u32 {
        self.free + self.cached
    }
}

/// A reservation did not fit; nothing was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{needed} pages needed, {available} of {total} available")]
pub struct NoPages {
    /// Pages that the sequence needs, those in the prefix cache included.
    pub needed: u32,
    /// Pages free or cached when it was refused.
    pub available: u32,
    /// All pages.
    pub total: u32,
}

type Hook = Box<dyn Fn() + Send + Sync>;

/// The paged pool with its prefix cache. Callable from any thread; no call waits for pages.
pub struct KvCache {
    pool: Mutex<Pool>,
    on_release: OnceLock<Hook>,
}

impl fmt::Debug for KvCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvCache")
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl KvCache {
    /// `total_pages` free pages of `page_tokens` tokens; `prefix_cache`: match and keep prefixes.
    pub fn new(total_pages: u32, page_tokens: u32, prefix_cache: bool) -> Arc<Self> {
        Arc::new(Self {
            pool: Mutex::new(Pool::new(total_pages, page_tokens, prefix_cache)),
            on_release: OnceLock::new(),
        })
    }

    /// Pages for `total_tokens` (the prompt plus all growth). The longest cached prefix of whole pages is shared, but never
    /// more than `prompt.len() - leave` tokens: `leave` is 1 where this engine must compute the last prompt token itself,
    /// 0 where the KV is pulled. All or nothing, at once; cached pages that nobody uses give way, least recently used first.
    pub fn reserve(self: &Arc<Self>, prompt: &[u32], leave: usize, total_tokens: usize) -> Result<SeqPages, NoPages> {
        let mut pool = self.pool.lock();
        let page_tokens = pool.page_tokens();
        let needed = total_tokens.max(prompt.len()).div_ceil(page_tokens);
        let matchable = &prompt[..prompt.len().saturating_sub(leave)];
        let Some((pages, path)) = pool.reserve(matchable, needed) else {
            let stats = pool.stats();
            return Err(NoPages {
                needed: needed as u32,
                available: stats.available(),
                total: stats.total,
            });
        };
        Ok(SeqPages {
            cache: Arc::clone(self),
            cached_tokens: path.depth_tokens(page_tokens),
            pages: pages.into(),
            path: Mutex::new(path),
        })
    }

    /// Makes the whole pages of `tokens` findable. `tokens` is the sequence so far, only as far as its KV is complete and
    /// known to be good. A page that is there already stays there, and ours stays ours.
    pub fn publish(&self, tokens: &[u32], pages: &SeqPages) {
        let mut path = pages.path.lock();
        self.pool.lock().publish(tokens, &pages.pages, &mut path);
    }

    /// Pages by state.
    pub fn stats(&self) -> PageStats {
        self.pool.lock().stats()
    }

    /// Tokens in a page.
    pub fn page_tokens(&self) -> usize {
        self.pool.lock().page_tokens()
    }

    /// Drops every cached page that nobody uses; says how many.
    pub fn flush(&self) -> u32 {
        let freed = self.pool.lock().flush();
        self.released();
        freed
    }

    /// Switches matching and keeping of prefixes. Switched off, the cache holds nothing that nobody uses.
    pub fn set_enabled(&self, enabled: bool) {
        self.pool.lock().set_enabled(enabled);
    }

    /// Calls `hook` after pages were released, outside of the lock, on the thread that released them. The first hook stays.
    pub(crate) fn on_release(&self, hook: impl Fn() + Send + Sync + 'static) {
        let _ = self.on_release.set(Box::new(hook));
    }

    fn released(&self) {
        if let Some(hook) = self.on_release.get() {
            hook();
        }
    }
}

/// The pages of one sequence, released when dropped. Shared as `Arc`: whoever still copies keeps a clone, so the pages are
/// free only after the last local copy.
pub struct SeqPages {
    cache: Arc<KvCache>,
    pages: Box<[PageId]>,
    cached_tokens: u32,
    path: Mutex<Path>,
}

impl SeqPages {
    /// The pages in order. The first `cached_tokens` tokens' pages are shared and must not be written.
    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }
    /// Tokens of the prompt whose KV lay in the prefix cache; whole pages.
    pub fn cached_tokens(&self) -> u32 {
        self.cached_tokens
    }
}

impl fmt::Debug for SeqPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SeqPages")
            .field("pages", &self.pages.len())
            .field("cached_tokens", &self.cached_tokens)
            .finish_non_exhaustive()
    }
}

impl Drop for SeqPages {
    fn drop(&mut self) {
        self.cache.pool.lock().release(&self.pages, self.path.get_mut());
        self.cache.released();
    }
}
