//! Deviations of some MoQ implementations from the drafts.

use millrace_moq::{Filter, Location, Parameters, message::SetupOptions};

/// How a peer interprets its draft. It is known from the implementation name in its SETUP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    #[default]
    Draft,
    /// `@moq/net`, the library below `@moq/watch`, a player for browsers. It expects a length in front of
    /// LARGEST_OBJECT, and works without that parameter. Its subscriptions ask for the next object, because its
    /// publishers send the current group from the beginning. It drops a group whose beginning it missed.
    MoqLiteJs,
}

impl Dialect {
    pub fn from_setup(setup: &SetupOptions) -> Self {
        match setup.implementation.as_deref() {
            Some("moq-lite-js") => Self::MoqLiteJs,
            _ => Self::Draft,
        }
    }

    /// Returns the parameters of an answer that name a track's largest location.
    pub fn largest(self, largest: Option<Location>) -> Parameters {
        let largest_object = largest.filter(|_| self == Self::Draft);
        Parameters { largest_object, ..Parameters::default() }
    }

    /// Returns the filter with which the relay serves a subscription that asks for `filter`. `None` means that it
    /// begins with the current group.
    pub fn filter(self, filter: Option<Filter>) -> Option<Filter> {
        filter.filter(|filter| self == Self::Draft || *filter != Filter::NextObject)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moq_lite_js_is_recognized_by_its_implementation_name() {
        let of = |name: &str| {
            Dialect::from_setup(&SetupOptions {
                implementation: Some(name.into()),
                ..SetupOptions::default()
            })
        };
        assert_eq!(
            [of("moq-lite-js"), of("moq-lite-js/2"), of("")].map(|it| it == Dialect::Draft),
            [false, true, true]
        );
        assert_eq!(Dialect::from_setup(&SetupOptions::default()), Dialect::Draft);
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
