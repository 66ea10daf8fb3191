//! Engines over real gRPC.

mod api;
mod generate;
mod models;
mod process;
mod sampling;
