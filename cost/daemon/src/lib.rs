//! Shows what the kernel's networking costs: live view, files, text, dashboard. `millrace-cost` makes the figures.

pub mod live;
pub mod losses;
pub mod outputs;
pub mod queue;
pub mod signals;
pub mod sink;
mod table;
mod text;
mod trend;
pub mod web;

#[cfg(test)]
mod tests {
    use millrace_cost::report::{Event, Lost};
    use millrace_testkit::documented::{COST, assert_named};

    #[test]
    fn events_and_losses_of_the_observer() {
        assert_named(COST, "event", Event::ALL.map(Event::name));
        let lost = serde_json::to_value(Lost::default()).expect("JSON");
        let lost = lost.as_object().expect("an object");
        assert_named(COST, "lost", lost.keys().map(String::as_str));
    }
}
