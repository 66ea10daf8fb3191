//! The router's tests that use it from outside, in one binary so that it links once.

mod serve;
mod text;
