//! Probes of those who look for a fault: marked, so that they are told apart from what users do.
//!
//! Whoever has the admin token draws a badge. A request that wears it in [`BADGE`] needs no key, and is left out of what is told of
//! users: their metrics, requests in flight, the last answer, what ended lately. A badge that is none marks nothing.

use std::time::{Duration, Instant};

use http::HeaderMap;
use http::header::HeaderName;
use parking_lot::Mutex;
use tandem_secrets::Token;

/// The header of a probe.
pub const BADGE: HeaderName = HeaderName::from_static("x-tandem-probe");
/// The longest that a badge is one.
pub const LONGEST: Duration = Duration::from_hours(1);
/// Badges at a time; one more takes the place of the oldest.
const WORN: usize = 16;

/// Those that are worn now.
#[derive(Debug, Default)]
pub struct Badges(Mutex<Vec<Badge>>);

#[derive(Debug)]
struct Badge {
    secret: Token,
    until: Instant,
}

impl Badges {
    /// Draws one that is worn for so long.
    pub fn draw(&self, time: Duration) -> Token {
        let secret = Token::draw();
        let mut worn = self.0.lock();
        let now = Instant::now();
        worn.retain(|badge| badge.until > now);
        if worn.len() == WORN {
            worn.remove(0);
        }
        worn.push(Badge {
            secret: secret.clone(),
            until: now + time.min(LONGEST),
        });
        secret
    }

    /// Does a request wear one of them?
    pub fn marks(&self, headers: &HeaderMap) -> bool {
        let mut values = headers.get_all(BADGE).iter();
        let (Some(value), None) = (values.next(), values.next()) else {
            return false;
        };
        let now = Instant::now();
        let worn = self.0.lock();
        worn.iter()
            .any(|badge| badge.until > now && badge.secret.opens(value.as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(values: &[&str]) -> HeaderMap {
        let values = values.iter().map(|value| (BADGE, value.parse().unwrap()));
        values.collect()
    }

    #[test]
    fn a_badge_that_nobody_drew_or_that_is_over_marks_a_request() {
        let badges = Badges::default();
        let worn = badges.draw(LONGEST);
        let headers = with(&[worn.text()]);
        assert!(badges.marks(&headers));
        assert!(!badges.marks(&with(&[])) && !badges.marks(&with(&["token-0123456789abcdef"])));
        let over = badges.draw(Duration::ZERO);
        assert!(!badges.marks(&with(&[over.text()])));
        assert!(!Badges::default().marks(&headers));
        for _ in 0..WORN {
            badges.draw(LONGEST);
        }
        assert!(!badges.marks(&headers), "they are bounded");
    }
}
