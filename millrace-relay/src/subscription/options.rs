//! What a subscriber asked for.

use std::time::Duration;

use millrace_proto::{
    moq::{Filter, GroupOrder, Parameters},
    relay::{filter::Window, track::Track},
};

/// What a subscriber asked for; REQUEST_UPDATE changes it.
#[derive(Clone, Debug)]
pub struct Options {
    pub window: Window,
    /// What the window was made of.
    pub filter: Option<Filter>,
    pub forward: bool,
    pub priority: u8,
    pub order: GroupOrder,
    pub object_timeout: Option<Duration>,
    pub subgroup_timeout: Option<Duration>,
}

impl Options {
    /// Of a SUBSCRIBE; what it leaves open is the track's.
    pub fn new(parameters: &Parameters, window: Window, track: &Track) -> Self {
        let properties = track.parsed_properties();
        let mut options = Self {
            window,
            filter: None,
            forward: true,
            priority: 128,
            order: properties.group_order.unwrap_or_default(),
            object_timeout: duration(properties.object_delivery_timeout),
            subgroup_timeout: duration(properties.subgroup_delivery_timeout),
        };
        options.apply(parameters, track);
        options
    }

    /// Takes over what `parameters` say, but for the window.
    pub fn apply(&mut self, parameters: &Parameters, track: &Track) {
        let properties = track.parsed_properties();
        self.filter = parameters.filter.or(self.filter);
        self.forward = parameters.forward.unwrap_or(self.forward);
        self.priority = parameters.subscriber_priority.unwrap_or(self.priority);
        self.order = parameters.group_order.unwrap_or(self.order);
        if parameters.object_delivery_timeout.is_some() {
            let publisher = properties.object_delivery_timeout;
            self.object_timeout = smaller(publisher, parameters.object_delivery_timeout);
        }
        if parameters.subgroup_delivery_timeout.is_some() {
            let publisher = properties.subgroup_delivery_timeout;
            self.subgroup_timeout = smaller(publisher, parameters.subgroup_delivery_timeout);
        }
    }
}

fn duration(millis: Option<u64>) -> Option<Duration> {
    millis.filter(|millis| *millis > 0).map(Duration::from_millis)
}

/// The smaller of two delivery timeouts in milliseconds, where 0 means none.
fn smaller(one: Option<u64>, other: Option<u64>) -> Option<Duration> {
    match (duration(one), duration(other)) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}
