//! What speaks to the API server.
//!
//! | module | does |
//! | --- | --- |
//! | [`kinds`] | names the kinds of children |
//! | [`cache`] | holds what the API server said last, by deployment |
//! | [`watch`] | feeds the cache, and says which deployment has to be looked at |
//! | [`lease`] | elects one operator of several |
//! | [`write`] | every write: only as the leader, within a deadline, counted |
//! | [`events`] | tells people of transitions |

pub mod cache;
pub mod events;
pub mod kinds;
pub mod lease;
pub mod watch;
pub mod write;
