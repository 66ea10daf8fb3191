//! What a span of this engine says of a failure.

use tandem_telemetry::Span;
use tandem_wire::Failure;
use tandem_wire::reason::source_name;

/// It failed, with this.
pub(crate) fn failed(span: &mut Span, failure: &Failure) {
    span.fail(failure.meaning().code, || failure.to_string());
    span.describe(|| [("tandem.error_source", source_name(failure.source).into())]);
}
