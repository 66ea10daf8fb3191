//! Engines over real gRPC.

mod api;
mod evidence;
mod generate;
mod models;
mod process;
mod sampling;
