//! The pages' book-keeping: reference counts, a radix whose edges are whole pages of tokens, and eviction.
//!
//! A node of the radix *is* a page, so nodes are found by page id. Who holds a node holds the whole path to it (see
//! [`Pool::publish`]); therefore every cached page can be evicted, and `free + cached` is what a reservation can get.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::cache::PageStats;
use crate::exec::PageId;

/// Tokens of one whole page. The map compares them in full; its hash only finds the bucket.
type Edge = Arc<[u32]>;

#[derive(Debug)]
struct Node {
    parent: Option<PageId>,
    edge: Edge,
    children: HashMap<Edge, PageId>,
    last_use: u64,
}

/// How far a sequence's tokens lie in the radix.
#[derive(Debug, Default)]
pub(super) struct Path {
    /// Whole pages walked.
    depth: usize,
    /// The node there.
    tip: Option<PageId>,
    /// Nodes on the path that are not the sequence's own pages; held so that nothing above its pages is evicted.
    pins: Vec<PageId>,
}

impl Path {
    /// Tokens walked.
    pub(super) fn depth_tokens(&self, page_tokens: usize) -> u32 {
        (self.depth * page_tokens) as u32
    }
}

#[derive(Debug)]
pub(super) struct Pool {
    page_tokens: usize,
    enabled: bool,
    free: Vec<PageId>,
    /// Holders of each page.
    refs: Vec<u32>,
    nodes: Vec<Option<Node>>,
    roots: HashMap<Edge, PageId>,
    /// Leaves that nobody holds, oldest use first.
    evictable: BTreeSet<(u64, PageId)>,
    clock: u64,
    cached: u32,
    held: u32,
}

impl Pool {
    pub(super) fn new(total_pages: u32, page_tokens: u32, enabled: bool) -> Self {
        Self {
            page_tokens: page_tokens.max(1) as usize,
            enabled,
            free: (0..total_pages).rev().collect(),
            refs: vec![0; total_pages as usize],
            nodes: (0..total_pages).map(|_| None).collect(),
            roots: HashMap::new(),
            evictable: BTreeSet::new(),
            clock: 0,
            cached: 0,
            held: 0,
        }
    }

    pub(super) fn stats(&self) -> PageStats {
        PageStats {
            total: self.refs.len() as u32,
            free: self.free.len() as u32,
            cached: self.cached,
            held: self.held,
        }
    }

    pub(super) fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// `pages` pages, of which the first lie in the radix with the first tokens of `matchable`. `None`: too few pages,
    /// and nothing has changed but the age of what matched.
    pub(super) fn reserve(&mut self, matchable: &[u32], pages: usize) -> Option<(Vec<PageId>, Path)> {
        self.clock += 1;
        let mut taken = Vec::with_capacity(pages);
        let mut path = Path::default();
        if self.enabled {
            for edge in matchable.chunks_exact(self.page_tokens).take(pages) {
                let Some(page) = self.child(path.tip, edge) else { break };
                self.hold(page);
                taken.push(page);
                path.tip = Some(page);
                path.depth += 1;
            }
        }
        let fresh = pages - taken.len();
        if fresh > self.free.len() + self.cached as usize {
            self.release(&taken, &path);
            return None;
        }
        for _ in 0..fresh {
            if self.free.is_empty() {
                self.evict_oldest();
            }
            let page = self.free.pop()?;
            self.hold(page);
            taken.push(page);
        }
        Some((taken, path))
    }

    /// Puts the whole pages of `tokens` into the radix, from where `path` stands. Where another page already lies there,
    /// that one stays and is pinned; the sequence's own stays outside and is freed with it.
    pub(super) fn publish(&mut self, tokens: &[u32], pages: &[PageId], path: &mut Path) {
        if !self.enabled {
            return;
        }
        for (edge, &own) in tokens.chunks_exact(self.page_tokens).zip(pages).skip(path.depth) {
            let node = if let Some(other) = self.child(path.tip, edge) {
                self.hold(other);
                path.pins.push(other);
                other
            } else {
                self.insert(path.tip, edge, own);
                own
            };
            path.tip = Some(node);
            path.depth += 1;
        }
    }

    /// Lets go of a sequence's pages and pins, deepest first.
    pub(super) fn release(&mut self, pages: &[PageId], path: &Path) {
        self.clock += 1;
        for &page in pages.iter().rev().chain(path.pins.iter().rev()) {
            self.let_go(page);
        }
    }

    /// Evicts everything that nobody holds.
    pub(super) fn flush(&mut self) -> u32 {
        let before = self.free.len();
        while self.evict_oldest() {}
        (self.free.len() - before) as u32
    }

    pub(super) fn set_enabled(&mut self, enabled: bool) {
        self.enabled = enabled;
        if !enabled {
            self.flush();
        }
    }

    fn child(&self, of: Option<PageId>, edge: &[u32]) -> Option<PageId> {
        match of {
            None => self.roots.get(edge).copied(),
            Some(page) => self.nodes[page as usize].as_ref()?.children.get(edge).copied(),
        }
    }

    fn hold(&mut self, page: PageId) {
        let refs = &mut self.refs[page as usize];
        *refs += 1;
        if *refs == 1 {
            self.held += 1;
            if let Some(node) = &self.nodes[page as usize] {
                self.cached -= 1;
                self.evictable.remove(&(node.last_use, page));
            }
        }
    }

    fn let_go(&mut self, page: PageId) {
        let refs = &mut self.refs[page as usize];
        assert!(*refs > 0, "page {page} is freed twice");
        *refs -= 1;
        if *refs > 0 {
            return;
        }
        self.held -= 1;
        match &mut self.nodes[page as usize] {
            None => self.free.push(page),
            Some(node) => {
                node.last_use = self.clock;
                self.cached += 1;
                self.settle(page);
            }
        }
    }

    fn insert(&mut self, parent: Option<PageId>, edge: &[u32], page: PageId) {
        let edge: Edge = edge.into();
        let siblings = match parent {
            None => Some(&mut self.roots),
            Some(p) => self.nodes[p as usize].as_mut().map(|n| &mut n.children),
        };
        let Some(siblings) = siblings else { return };
        siblings.insert(Arc::clone(&edge), page);
        self.nodes[page as usize] = Some(Node {
            parent,
            edge,
            children: HashMap::new(),
            last_use: self.clock,
        });
    }

    /// A node that nobody holds and that has no child may go: later, oldest first, or at once if the cache is off.
    fn settle(&mut self, page: PageId) {
        let mut next = Some(page);
        while let Some(page) = next.take() {
            if self.refs[page as usize] > 0 {
                return;
            }
            let Some(node) = self.nodes[page as usize].as_ref().filter(|n| n.children.is_empty()) else {
                return;
            };
            if self.enabled {
                self.evictable.insert((node.last_use, page));
            } else {
                next = self.detach(page);
            }
        }
    }

    fn evict_oldest(&mut self) -> bool {
        let Some((_, page)) = self.evictable.pop_first() else {
            return false;
        };
        if let Some(parent) = self.detach(page) {
            // with the cache off this frees the whole path
            self.settle(parent);
        }
        true
    }

    /// Takes an unheld leaf out of the radix and frees its page; returns its parent.
    fn detach(&mut self, page: PageId) -> Option<PageId> {
        let node = self.nodes[page as usize].take()?;
        let siblings = match node.parent {
            None => Some(&mut self.roots),
            Some(p) => self.nodes[p as usize].as_mut().map(|n| &mut n.children),
        };
        if let Some(siblings) = siblings {
            siblings.remove(&node.edge);
        }
        self.cached -= 1;
        self.free.push(page);
        node.parent
    }
}

#[cfg(test)]
impl Pool {
    /// Counts everything anew and compares.
    pub(super) fn check(&self) {
        let mut seen = vec![false; self.refs.len()];
        for &page in &self.free {
            assert!(
                !std::mem::replace(&mut seen[page as usize], true),
                "page {page} is free twice"
            );
            assert_eq!(self.refs[page as usize], 0, "free page {page} is held");
            assert!(self.nodes[page as usize].is_none(), "free page {page} is in the radix");
        }
        let held = self.refs.iter().filter(|r| **r > 0).count();
        let cached = (0..self.refs.len()).filter(|&p| self.nodes[p].is_some() && self.refs[p] == 0);
        assert_eq!(self.held as usize, held);
        assert_eq!(self.cached as usize, cached.count());
        assert_eq!(
            self.free.len() + self.cached as usize + held,
            self.refs.len(),
            "a page is lost"
        );
        for (page, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            assert_eq!(
                self.child(node.parent, &node.edge),
                Some(page as PageId),
                "page {page} cannot be found"
            );
            if let Some(parent) = node.parent {
                assert!(
                    self.refs[page] == 0 || self.refs[parent as usize] > 0,
                    "page {page} is held and its parent {parent} may be evicted"
                );
            }
            let leaf = node.children.is_empty() && self.refs[page] == 0;
            assert_eq!(self.evictable.contains(&(node.last_use, page as PageId)), leaf);
        }
        assert!(self.evictable.iter().all(|&(_, p)| self.nodes[p as usize].is_some()));
    }
}
