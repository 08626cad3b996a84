//! Checks the acknowledgements of packet grafts (`ack.h`) and their effect on congestion control (`congestion.h`). An
//! impossible acknowledgement must be refused, and a repeated one must change nothing.

const WINDOW: usize = 1024;
const COME_BYTES: usize = WINDOW / 2 / 8;

/// Copy of C's `struct graft_shared`.
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

/// Copy of C's `struct graft_ack`.
#[repr(C)]
struct GraftAckCopy {
    newest: u32,
    echo: u32,
    room: u32,
    pad: u32,
    come: [u8; COME_BYTES],
    tag: u64,
}

/// Copy of C's `struct congestion`.
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

// parsers.native.c asserts the same sizes and offsets for the C structures.
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

/// A session of packet grafts whose congestion control a test drives with simulated packets and time.
pub struct Controlled {
    shared: GraftSharedCopy,
    own: Congestion,
}

impl Controlled {
    /// Creates a session whose smoothed round-trip time is 20 ms. `start` is its first packet number.
    pub fn new(start: u32) -> Self {
        let mut shared = GraftSharedCopy::new(start);
        (shared.srtt_us, shared.rttvar_us) = (20_000, 1000);
        Self { shared, own: Congestion::default() }
    }

    /// Runs congestion control at time `ms`, after `come` more packets were delivered and `losses` more losses were
    /// detected. Then counts a full window of packets as sent. Returns the window in packets.
    pub fn look(&mut self, ms: u64, come: u32, losses: u32) -> u32 {
        self.shared.delivered = self.shared.delivered.wrapping_add(come);
        self.shared.losses += losses;
        if come > 0 {
            self.shared.acked_ns = ms * MS;
        }
        // SAFETY: all pointers refer to values of the declared types, which outlive the call.
        let window = unsafe { congestion_native_look(&mut self.own, &self.shared, 10, ms * MS) };
        self.shared.next = self.shared.delivered.wrapping_add(window);
        window
    }

    /// Runs congestion control as [`Self::look`] does, without losses, but leaves no packet in flight.
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

/// Checks a session with random operations, each encoded in 8 bytes. These select sending or receiving, packet numbers
/// near the current ones or anywhere, a bitmap, and the elapsed time in ms.
pub fn kernel_ack(data: &[u8]) {
    let Some((first, steps)) = data.split_first_chunk() else { return };
    // The first packet number is arbitrary, since packet numbers wrap around.
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
        // SAFETY: all pointers refer to values of the declared types, which outlive the call.
        let window = unsafe { congestion_native_look(&mut own, &shared, 10, now_ns) };
        assert!((1..=WINDOW as u32).contains(&window), "{window} packets may be under way");
    }
}

fn send(shared: &mut GraftSharedCopy, packets: u8, now_ns: u64) {
    for _ in 0..packets {
        // The sender has at most `WINDOW / 2` packets in flight, a limit that the packet function `window` enforces
        // too.
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
    // SAFETY: all pointers refer to values of the declared types, which outlive the call.
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
    // Receiving the same acknowledgement again must change nothing.
    let once = shared.clone();
    // SAFETY: all pointers refer to values of the declared types, which outlive the call.
    unsafe { ack_native_take(shared, number, &raw const ack, now_ns + MS) };
    assert!(once == *shared, "it was believed twice");
}
