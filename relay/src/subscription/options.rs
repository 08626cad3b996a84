//! Options of a subscription.

use std::time::Duration;

use millrace_moq::{
    Filter, GroupOrder, Parameters,
    property::subgroup_timeouts,
    tracks::{filter::LocationWindow, subgroup::SubgroupStream, track::Track},
};

/// Options of a subscription that the subscriber may set, and change by REQUEST_UPDATE.
#[derive(Clone, Debug)]
pub struct SubscriptionOptions {
    pub window: LocationWindow,
    /// The filter from which the range of locations (`window`) was computed.
    pub filter: Option<Filter>,
    pub forward: bool,
    pub priority: u8,
    pub order: GroupOrder,
    /// The subscriber's delivery timeout for objects, in milliseconds. 0 means none.
    pub object_timeout: Option<u64>,
    pub subgroup_timeout: Option<u64>,
}

/// How long single objects, and whole subgroups, may take to be delivered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timeouts {
    pub object: Option<Duration>,
    pub subgroup: Option<Duration>,
}

impl SubscriptionOptions {
    /// Returns the options of a SUBSCRIBE. Missing ones are taken from the track's properties.
    pub fn new(parameters: &Parameters, window: LocationWindow, track: &Track) -> Self {
        let mut options = Self {
            window,
            filter: None,
            forward: true,
            priority: 128,
            order: track.parsed_properties().group_order.unwrap_or_default(),
            object_timeout: None,
            subgroup_timeout: None,
        };
        options.apply(parameters);
        options
    }

    /// Applies `parameters` to all options except the range of locations (`window`).
    pub fn apply(&mut self, parameters: &Parameters) {
        self.filter = parameters.filter.or(self.filter);
        self.forward = parameters.forward.unwrap_or(self.forward);
        self.priority = parameters.subscriber_priority.unwrap_or(self.priority);
        self.order = parameters.group_order.unwrap_or(self.order);
        self.object_timeout = parameters.object_delivery_timeout.or(self.object_timeout);
        self.subgroup_timeout = parameters.subgroup_delivery_timeout.or(self.subgroup_timeout);
    }

    /// Returns the delivery timeouts of a subgroup, or of the track's datagrams if `subgroup` is `None`. Each is the
    /// smaller of the subscriber's and the publisher's. The first object of a subgroup may override the publisher's.
    pub fn timeouts(&self, track: &Track, subgroup: Option<&SubgroupStream>) -> Timeouts {
        let of_track = track.parsed_properties();
        let says =
            |subgroup: &&SubgroupStream| subgroup.header().properties && subgroup.header().first_object;
        let first = subgroup.filter(says).and_then(SubgroupStream::first_object);
        let (object, of_subgroup) =
            first.map(|first| subgroup_timeouts(&first.start.properties)).unwrap_or_default();
        Timeouts {
            object: smaller(object.or(of_track.object_delivery_timeout), self.object_timeout),
            subgroup: smaller(of_subgroup.or(of_track.subgroup_delivery_timeout), self.subgroup_timeout),
        }
    }
}

fn duration(millis: Option<u64>) -> Option<Duration> {
    millis.filter(|millis| *millis > 0).map(Duration::from_millis)
}

/// Returns the smaller of two delivery timeouts in milliseconds, where 0 means none.
fn smaller(one: Option<u64>, other: Option<u64>) -> Option<Duration> {
    match (duration(one), duration(other)) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Instant};

    use millrace_moq::{
        Namespace, Status, SubgroupHeader, SubgroupId, TrackName, data::encode_object_header,
        property::TrackProperties, tracks::subgroup::SubgroupReceiver,
    };

    use super::*;

    fn ms(millis: u64) -> Option<Duration> {
        Some(Duration::from_millis(millis))
    }

    /// Returns a subgroup whose two objects have these timeouts.
    fn subgroup(first_object: bool, first: &TrackProperties, second: &TrackProperties) -> SubgroupReceiver {
        let header = SubgroupHeader {
            alias: 1,
            group: 0,
            subgroup: SubgroupId::Zero,
            priority: None,
            properties: true,
            end_of_group: false,
            first_object,
        };
        let mut writer = SubgroupStream::begin(header, 0);
        let mut bytes = Vec::new();
        for (previous, id, properties) in [(None, 0, first), (Some(0), 1, second)] {
            let properties = properties.encode();
            encode_object_header(previous, id, Some(properties.as_bytes()), 0, Status::Normal, &mut bytes);
        }
        writer.push(Instant::now(), &bytes, |_| Ok(())).unwrap();
        writer
    }

    #[test]
    fn smaller_delivery_timeout_of_publisher_and_subscriber_applies() {
        let name = TrackName::new(Namespace::from_path("live").unwrap(), "video").unwrap();
        let track = Arc::new(Track::new(name));
        let said = |object, subgroup| TrackProperties {
            object_delivery_timeout: object,
            subgroup_delivery_timeout: subgroup,
            ..TrackProperties::default()
        };
        let nothing = said(None, None);
        track.set_properties(said(Some(500), Some(2000)).encode()).unwrap();
        let window = LocationWindow::resolve(None, None);
        let asked = Parameters { object_delivery_timeout: Some(300), ..Parameters::default() };
        let plain = SubscriptionOptions::new(&Parameters::default(), window, &track);
        let asking = SubscriptionOptions::new(&asked, window, &track);
        let of = |options: &SubscriptionOptions, writer: Option<&SubgroupReceiver>| {
            let Timeouts { object, subgroup } = options.timeouts(&track, writer.map(|one| &**one.subgroup()));
            (object, subgroup)
        };
        assert_eq!(of(&plain, None), (ms(500), ms(2000)));
        assert_eq!(of(&asking, None), (ms(300), ms(2000)));

        let own = subgroup(true, &said(Some(100), None), &said(Some(1), Some(1)));
        assert_eq!(of(&plain, Some(&own)), (ms(100), ms(2000)), "the first object speaks, no other");
        assert_eq!(of(&asking, Some(&own)), (ms(100), ms(2000)));
        let longer = subgroup(true, &said(Some(900), Some(0)), &nothing);
        assert_eq!(of(&plain, Some(&longer)), (ms(900), None));
        assert_eq!(of(&asking, Some(&longer)), (ms(300), None));
        let joined = subgroup(false, &said(Some(100), Some(100)), &nothing);
        assert_eq!(of(&plain, Some(&joined)), (ms(500), ms(2000)), "the first object is not there");
    }
}
