//! KV pages: who holds which page, and which prefixes lie in them.
//!
//! | module | holds |
//! | --- | --- |
//! | [`cache`] | [`KvCache`], the one lock, and [`SeqPages`], a sequence's pages as a value that frees itself |
//! | `pool` | reference counts, the radix of whole pages, least-recently-used eviction; knows no lock and no thread |
//!
//! A page is free, held (some [`SeqPages`] names it) or cached (the radix names it and nobody holds it), and
//! `free + cached + held = total` at every moment. Only bytes move elsewhere: see [`crate::exec::KvStore`].

pub mod cache;
mod pool;

pub use cache::{KvCache, NoPages, PageStats, SeqPages};

#[cfg(test)]
mod tests;
