//! Acknowledgements of packet grafts, `ack.h`, and what congestion control makes of them, `congestion.h`: whatever they say, in
//! whatever order, nothing is believed that cannot be, and nothing twice.

const WINDOW: usize = 1024;
const COME_BYTES: usize = WINDOW / 2 / 8;

/// `struct graft_shared`.
#[repr(C)]
#[derive(Clone, PartialEq, Eq)]
struct GraftSharedCopy {
    next: u32,
    newest: u32,
    sent_ns: u64,
    seen: [u64; WINDOW],
    complete: u32,
    begun: u32,
    birth: u32,
    turned: u32,
    acked: u32,
    delivered: u32,
    losses: u32,
    recover: u32,
    room: u32,
    srtt_us: u32,
    rttvar_us: u32,
    min_rtt_us: u32,
    acked_ns: u64,
    went_ns: [u64; WINDOW],
    leaves_ns: u64,
    epoch_in: u32,
    pad: u32,
}

/// `struct graft_ack`.
#[repr(C)]
struct GraftAckCopy {
    newest: u32,
    echo: u32,
    room: u32,
    pad: u32,
    come: [u8; COME_BYTES],
    tag: u64,
}

/// `struct congestion`.
#[repr(C)]
#[derive(Default)]
struct Congestion {
    begun: u32,
    window: u32,
    threshold: u32,
    delivered: u32,
    losses: u32,
    pad: u32,
    since_ns: u64,
}

// As parsers.native.c asserts of C's.
const _: () = {
    use std::mem::offset_of;

    assert!(
        size_of::<GraftSharedCopy>() == 16472
            && size_of::<GraftAckCopy>() == 88
            && size_of::<Congestion>() == 32
    );
    assert!(offset_of!(GraftSharedCopy, acked) == 8224 && offset_of!(GraftSharedCopy, went_ns) == 8264);
};

unsafe extern "C" {
    fn ack_native_take(
        shared: *mut GraftSharedCopy,
        number: u32,
        ack: *const GraftAckCopy,
        now_ns: u64,
    ) -> i32;
    fn congestion_native_look(
        own: *mut Congestion,
        shared: *const GraftSharedCopy,
        initial: u32,
        now_ns: u64,
    ) -> u32;
}

const STEP: usize = 8;
const MS: u64 = 1_000_000;

/// A session under congestion control: the packets sent and delivered, and the window as time passes.
pub struct Controlled {
    shared: GraftSharedCopy,
    own: Congestion,
}

impl Controlled {
    /// The round trip is 20 ms.
    pub fn new(start: u32) -> Self {
        let mut shared = GraftSharedCopy::new(start);
        (shared.srtt_us, shared.rttvar_us) = (20_000, 1000);
        Self { shared, own: Congestion::default() }
    }

    /// Runs the control at a time, after `come` more packets have arrived and `losses` more losses were found. Sends as much as the window
    /// allows, and returns it.
    pub fn look(&mut self, ms: u64, come: u32, losses: u32) -> u32 {
        self.shared.delivered = self.shared.delivered.wrapping_add(come);
        self.shared.losses += losses;
        if come > 0 {
            self.shared.acked_ns = ms * MS;
        }
        // SAFETY: both are what they are called.
        let window = unsafe { congestion_native_look(&mut self.own, &self.shared, 10, ms * MS) };
        self.shared.next = self.shared.delivered.wrapping_add(window);
        window
    }

    /// The same, and nothing is sent.
    pub fn look_idle(&mut self, ms: u64, come: u32) -> u32 {
        let window = self.look(ms, come, 0);
        self.shared.next = self.shared.delivered;
        window
    }
}

impl GraftSharedCopy {
    fn new(start: u32) -> Self {
        Self {
            next: start,
            newest: 0,
            sent_ns: 0,
            seen: [0; WINDOW],
            complete: 0,
            begun: 0,
            birth: 0,
            turned: 0,
            acked: start,
            delivered: start,
            losses: 0,
            recover: start,
            room: 0,
            srtt_us: 0,
            rttvar_us: 0,
            min_rtt_us: 0,
            acked_ns: 0,
            went_ns: [0; WINDOW],
            leaves_ns: 0,
            epoch_in: 0,
            pad: 0,
        }
    }
}

/// Steps of 8 bytes: what happens, numbers near those that are known or anywhere, bits, and time.
pub fn kernel_ack(data: &[u8]) {
    let Some((first, steps)) = data.split_first_chunk() else { return };
    // Numbers wrap around.
    let start = u32::from_be_bytes(*first);
    let mut shared = GraftSharedCopy::new(start);
    let mut own = Congestion::default();
    let mut now_ns = MS;
    for step in steps.as_chunks::<STEP>().0 {
        now_ns += u64::from(step[7]) * MS;
        match step[0] % 3 {
            0 => send(&mut shared, step[1], now_ns),
            _ => receive_step(&mut shared, step, now_ns),
        }
        // SAFETY: both are what they are called.
        let window = unsafe { congestion_native_look(&mut own, &shared, 10, now_ns) };
        assert!((1..=WINDOW as u32).contains(&window), "{window} packets may be under way");
    }
}

fn send(shared: &mut GraftSharedCopy, packets: u8, now_ns: u64) {
    for _ in 0..packets {
        // As `window` has it.
        if shared.next.wrapping_sub(shared.acked) < WINDOW as u32 / 2 {
            shared.went_ns[shared.next as usize % WINDOW] = now_ns;
            shared.next = shared.next.wrapping_add(1);
        }
    }
}

fn receive_step(shared: &mut GraftSharedCopy, step: &[u8; STEP], now_ns: u64) {
    let near = |base: u32, byte: u8| base.wrapping_add_signed((byte as i8).into());
    let anywhere = u32::from_be_bytes([step[1], step[2], step[3], step[4]]);
    let number = if step[0] & 64 == 0 { near(shared.acked, step[1]) } else { anywhere };
    let ack = GraftAckCopy {
        newest: near(shared.next, step[2]).to_be(),
        echo: if step[0] & 128 == 0 { near(shared.next, step[3]) } else { anywhere }.to_be(),
        room: near(shared.next, step[4]).to_be(),
        pad: 0,
        come: [step[5] & step[6]; COME_BYTES],
        tag: 0,
    };
    let before = shared.clone();
    // SAFETY: both are what they are called.
    let refused = unsafe { ack_native_take(shared, number, &raw const ack, now_ns) } != 0;
    let behind = |newer: u32, older: u32| newer.wrapping_sub(older);
    assert_eq!(before.next, shared.next);
    assert!(behind(shared.acked, before.acked) <= behind(before.next, before.acked), "more than was sent");
    assert!(
        behind(shared.next, shared.delivered) <= behind(shared.next, shared.acked),
        "less than all that came"
    );
    assert!(behind(shared.delivered, before.delivered) <= WINDOW as u32, "it went back");
    assert!(shared.losses.wrapping_sub(before.losses) <= 1);
    assert!(shared.min_rtt_us == 0 || shared.srtt_us >= shared.min_rtt_us / 2, "{} us", shared.srtt_us);
    if refused || (number != before.acked && behind(number, before.acked) > WINDOW as u32) {
        assert!(before == *shared, "it says nothing that can be");
    }
    // The same once more says nothing new.
    let once = shared.clone();
    // SAFETY: as above.
    unsafe { ack_native_take(shared, number, &raw const ack, now_ns + MS) };
    assert!(once == *shared, "it was believed twice");
}
