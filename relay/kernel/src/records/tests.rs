use super::*;

struct RecordScene {
    records: RecordClaims<&'static str>,
    numbers: HashMap<&'static str, u64>,
    now: Instant,
}

impl RecordScene {
    fn new(most: usize) -> Self {
        Self { records: RecordClaims::new(most), numbers: HashMap::new(), now: Instant::now() }
    }

    fn set(&mut self, name: &'static str, worth: Worth) {
        let records = &self.records;
        let now = self.now;
        let number = *self.numbers.entry(name).or_insert_with(|| records.enter(name, now));
        records.set_worth(number, worth, now);
    }

    fn all(&mut self, worth: Worth, names: &[&'static str]) {
        names.iter().for_each(|name| self.set(name, worth));
    }

    /// Returns the names of the connections that are granted a record in the kernel's tables, and of those that have to
    /// return theirs.
    fn decide(&self) -> (Vec<&'static str>, Vec<&'static str>) {
        let mut granted = Vec::new();
        let mut recalled = Vec::new();
        for decision in self.records.decide(self.now).decisions {
            match decision {
                RecordDecision::Grant(number, name) => {
                    assert_eq!(number, self.numbers[name]);
                    granted.push(name);
                }
                RecordDecision::Recall(name) => recalled.push(name),
            }
        }
        (granted, recalled)
    }

    fn returned(&self, name: &str) {
        self.records.returned(self.numbers[name]);
    }

    fn standing(&self, name: &str) -> OffloadStanding {
        self.records.standing(self.numbers[name])
    }
}

const NOBODY: Vec<&str> = Vec::new();

#[test]
fn unauthorized_connection_gets_no_kernel_record() {
    let mut scene = RecordScene::new(2);
    scene.all(Worth::Nothing, &["a", "b", "c"]);
    assert_eq!(scene.decide(), (NOBODY, NOBODY));
    assert_eq!(scene.standing("a"), OffloadStanding::Unproven);
    scene.set("c", Worth::Idle);
    assert_eq!(scene.decide(), (vec!["c"], NOBODY));
    assert_eq!(scene.standing("c"), OffloadStanding::Held);
}

#[test]
fn kernel_records_go_first_to_upstreams_then_publishers_then_subscribers() {
    let mut scene = RecordScene::new(5);
    scene.all(Worth::Idle, &["idle"]);
    scene.all(Worth::Subscriber, &["first", "second"]);
    scene.all(Worth::Publisher, &["publisher"]);
    scene.all(Worth::Upstream, &["upstream"]);
    assert_eq!(scene.decide().0, ["upstream", "publisher", "first", "second", "idle"]);
}

#[test]
fn publisher_takes_the_kernel_record_of_the_newest_subscriber() {
    let mut scene = RecordScene::new(3);
    scene.all(Worth::Subscriber, &["first", "second", "third", "fourth"]);
    assert_eq!(scene.decide(), (vec!["first", "second", "third"], NOBODY));
    scene.set("publisher", Worth::Publisher);
    assert_eq!(scene.decide(), (NOBODY, vec!["third"]));
    assert_eq!(scene.standing("third"), OffloadStanding::Taken);
    assert_eq!(scene.standing("fourth"), OffloadStanding::Waiting);
    assert_eq!(scene.decide(), (NOBODY, NOBODY), "one is on its way");
    assert_eq!(scene.records.taken(), 1);
    scene.returned("third");
    assert_eq!(scene.decide(), (vec!["publisher"], NOBODY));
    // A connection whose record in the kernel's tables was taken gets one again before connections that began to wait
    // later.
    scene.set("first", Worth::Nothing);
    assert_eq!(scene.decide(), (NOBODY, vec!["first"]));
    scene.returned("first");
    assert_eq!(scene.decide(), (vec!["third"], NOBODY));
    assert_eq!(scene.standing("third"), OffloadStanding::Held);
    assert_eq!(scene.records.taken(), 1, "one that was of no use was not taken from a subscriber");
}

#[test]
fn kernel_record_is_taken_only_from_subscriber_for_publisher_or_upstream() {
    let mut scene = RecordScene::new(2);
    scene.all(Worth::Publisher, &["one", "other"]);
    scene.decide();
    scene.all(Worth::Upstream, &["upstream"]);
    scene.all(Worth::Publisher, &["late"]);
    assert_eq!(scene.decide(), (NOBODY, NOBODY));
    scene.set("one", Worth::Subscriber);
    assert_eq!(scene.decide(), (NOBODY, vec!["one"]));
    scene.returned("one");
    assert_eq!(scene.decide(), (vec!["upstream"], NOBODY));
    let mut scene = RecordScene::new(1);
    scene.all(Worth::Subscriber, &["first", "second"]);
    scene.decide();
    scene.now += Duration::from_secs(3600);
    assert_eq!(scene.decide(), (NOBODY, NOBODY));
}

#[test]
fn kernel_record_idle_beyond_the_grace_time_goes_to_a_subscriber() {
    let mut scene = RecordScene::new(2);
    scene.all(Worth::Idle, &["first", "second", "third"]);
    assert_eq!(scene.decide(), (vec!["first", "second"], NOBODY), "one is enough to have shown a right");
    scene.set("subscriber", Worth::Subscriber);
    assert_eq!(scene.decide(), (NOBODY, NOBODY), "whoever changes tracks has none for a moment");
    scene.now += GRACE;
    assert_eq!(scene.decide(), (NOBODY, vec!["second"]));
    scene.returned("second");
    assert_eq!(scene.decide(), (vec!["subscriber"], NOBODY));
    assert_eq!(scene.standing("second"), OffloadStanding::Waiting);
    assert_eq!(scene.records.taken(), 0);
    // A connection that gets a new subscription soon after its last one ended keeps its record in the kernel's tables.
    scene.set("first", Worth::Subscriber);
    scene.set("second", Worth::Subscriber);
    scene.now += GRACE;
    assert_eq!(scene.decide(), (NOBODY, NOBODY));
}

#[test]
fn kernel_record_of_a_closed_connection_goes_to_the_next_waiting_one() {
    let mut scene = RecordScene::new(1);
    scene.all(Worth::Publisher, &["gone", "next", "last"]);
    assert_eq!(scene.decide().0, ["gone"]);
    scene.records.end(scene.numbers["gone"]);
    scene.set("gone", Worth::Upstream);
    assert_eq!(scene.decide(), (NOBODY, vec!["gone"]), "it claims nothing any more");
    scene.returned("gone");
    assert_eq!(scene.decide(), (vec!["next"], NOBODY));
    // The connection ends while it has a record in the kernel's tables.
    scene.records.leave(scene.numbers["next"]);
    assert_eq!(scene.decide(), (NOBODY, NOBODY));
    scene.returned("next");
    assert_eq!(scene.decide(), (vec!["last"], NOBODY));
    assert_eq!(scene.records.waiting(), 0);
}

#[test]
fn connection_waits_if_its_kernel_record_cannot_be_created() {
    let mut scene = RecordScene::new(1);
    scene.set("first", Worth::Subscriber);
    assert_eq!(scene.decide().0, ["first"]);
    scene.returned("first");
    assert_eq!(scene.standing("first"), OffloadStanding::Waiting);
    assert_eq!(scene.decide().0, ["first"]);
}

/// Claims are added, changed and removed in random order. There are never more records in the kernel's tables than the
/// limit allows, and no record is unused while a claim waits.
#[test]
fn random_claims_never_exceed_kernel_records_or_leave_one_unused() {
    const WORTHS: [Worth; 5] =
        [Worth::Nothing, Worth::Idle, Worth::Subscriber, Worth::Publisher, Worth::Upstream];
    let mut rng = fastrand::Rng::with_seed(34);
    let records = RecordClaims::new(4);
    let mut now = Instant::now();
    let mut claims = Vec::new();
    let mut held = Vec::new();
    let mut recalled = Vec::new();
    for _ in 0..20_000 {
        now += Duration::from_millis(rng.u64(0..200));
        match rng.u8(0..10) {
            0 if claims.len() < 12 => {
                let tag = rng.u64(..);
                claims.push((records.enter(tag, now), tag));
            }
            1 if !claims.is_empty() => {
                let (number, tag) = claims.swap_remove(rng.usize(..claims.len()));
                records.leave(number);
                if held.contains(&number) && !recalled.contains(&(number, tag)) {
                    recalled.push((number, tag));
                }
            }
            2 if !recalled.is_empty() => {
                let (number, _) = recalled.swap_remove(rng.usize(..recalled.len()));
                held.retain(|one| *one != number);
                records.returned(number);
            }
            _ if !claims.is_empty() => {
                let (number, _) = claims[rng.usize(..claims.len())];
                records.set_worth(number, WORTHS[rng.usize(..WORTHS.len())], now);
            }
            _ => {}
        }
        let Decided { decisions, is_short } = records.decide(now);
        for decision in decisions {
            match decision {
                RecordDecision::Grant(number, _) => {
                    assert!(!held.contains(&number), "two records for one");
                    held.push(number);
                }
                RecordDecision::Recall(tag) => {
                    let (number, _) = *claims.iter().find(|(_, one)| *one == tag).expect("a claim");
                    assert!(held.contains(&number) && !recalled.contains(&(number, tag)));
                    recalled.push((number, tag));
                }
            }
        }
        assert!(held.len() <= 4);
        assert_eq!(is_short, records.waiting() > 0);
        assert!(!is_short || held.len() == 4, "somebody waits, and one is free");
    }
}
