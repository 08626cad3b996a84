//! What some implementations take the drafts for.

use millrace_moq::{Filter, Location, Parameters, message::Setup};

/// How a peer reads and means its draft, by the implementation that its SETUP names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    #[default]
    Draft,
    /// `@moq/net`, the library under `@moq/watch`, which browsers play with. It reads LARGEST_OBJECT as if a length stood in
    /// front, and does without the parameter where it is missing. Its subscriptions ask for the next object, since it
    /// counts on publishers that send the current group whole; a group whose beginning it misses it drops.
    MoqLiteJs,
}

impl Dialect {
    pub fn of(setup: &Setup) -> Self {
        match setup.implementation.as_deref() {
            Some("moq-lite-js") => Self::MoqLiteJs,
            _ => Self::Draft,
        }
    }

    /// Parameters of an answer that say how far a track is.
    pub fn largest(self, largest: Option<Location>) -> Parameters {
        let largest_object = largest.filter(|_| self == Self::Draft);
        Parameters { largest_object, ..Parameters::default() }
    }

    /// What a subscription begins with that names `filter`; none begins with the current group.
    pub fn filter(self, filter: Option<Filter>) -> Option<Filter> {
        filter.filter(|filter| self == Self::Draft || *filter != Filter::NextObject)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_moq_lite_js() {
        let of = |name: &str| Dialect::of(&Setup { implementation: Some(name.into()), ..Setup::default() });
        assert_eq!(
            [of("moq-lite-js"), of("moq-lite-js/2"), of("")].map(|it| it == Dialect::Draft),
            [false, true, true]
        );
        assert_eq!(Dialect::of(&Setup::default()), Dialect::Draft);
        let largest = Some(Location::new(7, 3));
        assert_eq!(Dialect::Draft.largest(largest).largest_object, largest);
        assert_eq!(Dialect::MoqLiteJs.largest(largest), Parameters::default());
        for filter in [None, Some(Filter::NextObject), Some(Filter::NEXT_GROUP)] {
            assert_eq!(Dialect::Draft.filter(filter), filter);
            let kept = filter.filter(|filter| *filter == Filter::NEXT_GROUP);
            assert_eq!(Dialect::MoqLiteJs.filter(filter), kept);
        }
    }
}
