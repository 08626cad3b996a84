//! Shows the CPU time of the kernel's networking: live view, log files, text and web dashboard. `millrace-cost`
//! measures it.
#![deny(missing_docs)]

pub mod live;
pub mod losses;
pub mod outputs;
pub mod queue;
pub mod rights;
pub mod signals;
pub mod sink;
mod table;
mod text;
mod trend;
pub mod web;

#[cfg(test)]
mod tests {
    use millrace_cost::report::{Event, LostObservations};
    use millrace_testkit::documented::{COST, assert_named};

    #[test]
    fn every_event_and_loss_counter_of_the_cost_observer_is_documented() {
        assert_named(COST, "event", Event::ALL.map(Event::name));
        let lost = serde_json::to_value(LostObservations::default()).expect("JSON");
        let lost = lost.as_object().expect("an object");
        assert_named(COST, "lost", lost.keys().map(String::as_str));
    }
}
