//! What is planted to try `tandem diagnose`, and which layer has to come out.

/// One fault, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Row {
    /// A client takes nothing of its answer.
    ClientNotReading,
    /// A proxy holds the later answers of a connection.
    ProxyHolds,
    /// A proxy has no connection left for anybody.
    ProxyExhausted,
    /// A proxy ends answers half way.
    ProxyCuts,
    /// The router's template and tokenizer take long.
    TokenizerSlow,
    /// The router hands nothing on to engines.
    RouterBlocked,
    /// Each layer of a prompt takes long.
    PrefillSlow,
    /// Prefill's process is gone.
    PrefillDead,
    /// KV is not sent.
    TransferStalled,
    /// Decode's step hangs.
    DecodeWedged,
    /// More is asked of decode than it runs at once.
    DecodeOverloaded,
    /// Decode was started again, and its model is not there yet.
    DecodeLoading,
    /// Nothing is wrong.
    Idle,
}

impl Row {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::ClientNotReading,
        Self::ProxyHolds,
        Self::ProxyExhausted,
        Self::ProxyCuts,
        Self::TokenizerSlow,
        Self::RouterBlocked,
        Self::PrefillSlow,
        Self::PrefillDead,
        Self::TransferStalled,
        Self::DecodeWedged,
        Self::DecodeOverloaded,
        Self::DecodeLoading,
        Self::Idle,
    ];

    /// As docs/diagnose.md calls it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ClientNotReading => "client not reading",
            Self::ProxyHolds => "proxy holding answers",
            Self::ProxyExhausted => "proxy pool exhausted",
            Self::ProxyCuts => "proxy cutting streams",
            Self::TokenizerSlow => "tokenizer slow",
            Self::RouterBlocked => "router blocked",
            Self::PrefillSlow => "prefill slow",
            Self::PrefillDead => "prefill dead",
            Self::TransferStalled => "transfer stalled",
            Self::DecodeWedged => "decode wedged",
            Self::DecodeOverloaded => "decode overloaded",
            Self::DecodeLoading => "decode loading",
            Self::Idle => "idle",
        }
    }

    /// The layer at fault, as `--json` names it.
    pub const fn layer(self) -> Option<&'static str> {
        match self {
            Self::ClientNotReading | Self::ProxyHolds | Self::ProxyExhausted | Self::ProxyCuts => Some("client_path"),
            Self::TokenizerSlow | Self::RouterBlocked => Some("router"),
            Self::PrefillSlow | Self::PrefillDead => Some("prefill"),
            Self::TransferStalled => Some("transfer"),
            Self::DecodeWedged => Some("decode"),
            Self::DecodeOverloaded | Self::DecodeLoading | Self::Idle => None,
        }
    }

    /// What is found through `--via`, as `--json` names it.
    pub const fn finding(self) -> &'static str {
        match self {
            Self::DecodeOverloaded | Self::Idle => "no_fault",
            // an engine that loads cannot be measured
            Self::DecodeLoading => "undecided",
            _ => "fault",
        }
    }
}
