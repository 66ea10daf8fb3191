//! One fault after the other, planted in a running stack, and what `tandem diagnose` says of each: `-- --nocapture` prints the
//! table. Needs the binaries with faults; scripts/test.py builds them.

#![expect(clippy::expect_used, reason = "helpers of tests: a step that fails fails the test")]

mod examples;
mod multiround;
mod proxy;
mod rig;
mod rows;
mod shipped;
mod table;
