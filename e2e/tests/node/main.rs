//! What needs real nodes: containerd, kubelets, the shipped images, helm. One binary, so that the tests share one cluster; they run one
//! after the other, for each has a deployment of its own on two processors.

#![expect(clippy::expect_used, reason = "helpers of tests: a step that fails fails the test")]

mod capacity;
mod diagnose;
mod edits;
mod install;
mod losses;
mod network;
mod walk;
