//! Measures the processor time that one object costs.

use super::*;

/// Prints the processor time of a packet-sized object for one subscriber, without sealing, and asserts nothing: `cargo
/// test -p millrace-quic --release --lib processor_time_per_object_is_measured -- --ignored --nocapture`
#[test]
#[ignore = "soak: measures, on a quiet machine"]
fn processor_time_per_object_is_measured() {
    const SUBSCRIBERS: usize = 1000;
    const OBJECTS: u32 = 300;
    const OBJECT: u64 = 1130;
    let mut now = Instant::now();
    let source = Fast::new();
    let peer = PeerLimits {
        max_data: u64::MAX >> 2,
        max_stream_data_uni: u64::MAX >> 2,
        max_streams_uni: 10,
        ..PeerLimits::default()
    };
    let mut subscribers: Vec<_> = (0..SUBSCRIBERS)
        .map(|_| {
            let mut down = Downstream::new(Config::new(CODES), peer, now);
            let stream = NewStream {
                source: source.clone(),
                priority: Priority::default(),
                owner: 0,
                object_timeout: None,
                subgroup_timeout: None,
                max_delay: None,
                asked: AskedRange::Nothing,
                label: Label::default(),
            };
            let key = down.open(stream);
            (down, key)
        })
        .collect();
    let (mut waking, mut polling, mut sending, mut acking) =
        <(Duration, Duration, Duration, Duration)>::default();
    let mut out = Vec::with_capacity(SUBSCRIBERS * MTU);
    let mut contents = Vec::with_capacity(SUBSCRIBERS);
    for number in 0..u64::from(OBJECTS) {
        source.push(OBJECT);
        let started = Instant::now();
        for (down, key) in &mut subscribers {
            down.wake(*key);
        }
        waking += started.elapsed();
        out.clear();
        let started = Instant::now();
        for (down, _) in &mut subscribers {
            contents.push(down.poll_frames(now, MTU, &mut out).expect("owed"));
        }
        polling += started.elapsed();
        let started = Instant::now();
        for ((down, _), content) in subscribers.iter_mut().zip(contents.drain(..)) {
            down.on_sent(now, number, MTU, content);
        }
        sending += started.elapsed();
        now += Duration::from_millis(2);
        let ack = AckRanges { delay: Duration::ZERO, ranges: vec![0..=number], ecn: None };
        let started = Instant::now();
        for (down, _) in &mut subscribers {
            down.on_ack(now, &ack).expect("sent");
        }
        acking += started.elapsed();
    }
    let each = |time: Duration| time / (OBJECTS * SUBSCRIBERS as u32);
    println!(
        "wake {:?}, poll_frames with copy {:?}, on_sent {:?}, on_ack {:?}",
        each(waking),
        each(polling),
        each(sending),
        each(acking)
    );
}
