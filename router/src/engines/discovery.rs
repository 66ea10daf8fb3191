//! Where a side's engines are: named by flags, or found in a cluster ([`EndpointSlices`]).
//!
//! [`EndpointSlices`]: super::slices::EndpointSlices

use super::pool::Pool;
use std::sync::Arc;

/// Knows a side's engines.
pub trait Discovery: Send + 'static {
    /// Sets the pool to what there is, whenever that has changed, for as long as it is polled.
    fn follow(self, pool: Arc<Pool>) -> impl Future<Output = ()> + Send;
}

/// Engines that flags name: they stay the same.
#[derive(Debug)]
pub struct Named(pub Vec<String>);

impl Discovery for Named {
    async fn follow(self, pool: Arc<Pool>) {
        pool.set(&self.0);
    }
}
