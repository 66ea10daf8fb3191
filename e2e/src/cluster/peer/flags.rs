//! The arguments of a container, each as `--flag=value`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::str::FromStr;

/// By name, without `--`.
#[derive(Debug)]
pub struct Flags<'a>(BTreeMap<&'a str, &'a str>);

impl<'a> Flags<'a> {
    /// Of a container's arguments.
    pub fn of(args: &'a [String]) -> Self {
        let pairs = args.iter().filter_map(|arg| arg.strip_prefix("--")?.split_once('='));
        Self(pairs.collect())
    }

    /// As it was given.
    pub fn text(&self, name: &str) -> Option<&'a str> {
        self.0.get(name).copied()
    }

    /// A flag that has to be there and to be understood.
    pub fn value<T: FromStr>(&self, name: &str) -> Result<T, String> {
        let text = self.text(name).ok_or_else(|| format!("no --{name}"))?;
        text.parse().map_err(|_| format!("--{name}={text} is not understood"))
    }

    /// Where to listen.
    pub fn listen(&self, name: &str) -> Result<SocketAddr, String> {
        self.value(name)
    }
}
