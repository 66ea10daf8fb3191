//! Where an engine's further ports are.

/// Why a port that an engine names cannot be dialled; for the middle of a sentence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// No colon.
    #[error("has no port")]
    NoPort,
    /// After the colon stands no number of a port.
    #[error("has no valid port")]
    Port,
    /// It relies on the control port's host, which is not there either.
    #[error("has no host and neither has the control endpoint")]
    NoHost,
}

/// host:port of a port that an engine names; an empty host means the host of its control port, as the caller dials that.
pub fn beside(named: &str, control: &str) -> Result<String, EndpointError> {
    let (host, port) = named.rsplit_once(':').ok_or(EndpointError::NoPort)?;
    let port: u16 = port.parse().map_err(|_| EndpointError::Port)?;
    if !host.is_empty() {
        return Ok(format!("{host}:{port}"));
    }
    let (host, _) = control.rsplit_once(':').ok_or(EndpointError::NoHost)?;
    Ok(format!("{host}:{port}"))
}
