//! Converts messages of applications to datagrams. A message that is too long for one datagram is sent in parts,
//! which the receiver joins.
//!
//! Incomplete messages are bounded in number and in bytes: beyond the bound the oldest one is discarded and counted. A
//! part may arrive twice. If the interface's queue drops a part, the send call fails, so the library sends the part
//! again; but the session's graft (its list of packet functions) retransmits the dropped packet, too.
//!
//! ```text
//!  0                   1                   2                   3
//! |     kind      |   in order    |             part              |
//! |             parts             |            message ...
//!       ... message, 32 bits      |  bytes ...
//! ```

use std::collections::VecDeque;

/// Length of a datagram's header, in bytes.
pub const HEADER_BYTES: usize = 10;
/// Largest message, in bytes.
pub const MESSAGE_MAX: usize = 1 << 20;
/// Largest number of incomplete messages that a receiver stores.
pub const INCOMPLETE_MAX: usize = 64;
/// Most bytes of memory for the parts of incomplete messages, and for the tables that hold these parts.
pub const INCOMPLETE_BYTES: usize = 4 << 20;

/// Number of latest messages for which the receiver remembers whether they are complete or discarded. A message further
/// behind the newest cannot arrive: the packet functions in the kernel drop packets that are 1024 behind the newest
/// packet, and each packet belongs to one message.
const SEEN: u32 = 2048;

const PART: u8 = 1;
const END: u8 = 2;
/// Bytes of memory for a part's entry in the table of its message.
const PLACE_BYTES: usize = size_of::<Option<Box<[u8]>>>();

/// A datagram of a session.
///
/// ```
/// use millrace_messages::parts::{MessageDatagram, MessagePart};
///
/// let part = MessageDatagram::Part(MessagePart { message: 7, part: 0, parts: 1, in_order: true, bytes: b"whole" });
/// assert_eq!(MessageDatagram::read(&part.write()), Some(part));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageDatagram<'a> {
    /// A whole message, or a part of one.
    Part(MessagePart<'a>),
    /// States that the sender sends no more messages, and how many it has sent, modulo 2^32.
    End(u32),
}

/// A part of a message, which is sent as one datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessagePart<'a> {
    /// Number of the message. The sender counts from 0, modulo 2^32.
    pub message: u32,
    /// Number of the part, which starts at 0.
    pub part: u16,
    /// Number of parts of the message, at least 1.
    pub parts: u16,
    /// True if the receiver returns the message only after all earlier messages.
    pub in_order: bool,
    /// The part's bytes. Only a message of one part may be empty.
    pub bytes: &'a [u8],
}

impl<'a> MessageDatagram<'a> {
    /// Parses a datagram; returns `None` if it is not a valid one.
    pub fn read(datagram: &'a [u8]) -> Option<Self> {
        let (header, bytes) = datagram.split_first_chunk::<HEADER_BYTES>()?;
        let [kind, in_order @ 0..=1, p0, p1, n0, n1, m0, m1, m2, m3] = *header else { return None };
        let message = u32::from_be_bytes([m0, m1, m2, m3]);
        let part = u16::from_be_bytes([p0, p1]);
        let parts = u16::from_be_bytes([n0, n1]);
        match kind {
            // Only a message of one part may be empty.
            PART if part < parts && (parts == 1 || !bytes.is_empty()) => {
                Some(Self::Part(MessagePart { message, part, parts, in_order: in_order == 1, bytes }))
            }
            END if in_order == 0 && part == 0 && parts == 0 && bytes.is_empty() => Some(Self::End(message)),
            _ => None,
        }
    }

    /// Returns the bytes of the datagram.
    pub fn write(&self) -> Vec<u8> {
        let (kind, message, part, parts, in_order, bytes) = match *self {
            Self::Part(MessagePart { message, part, parts, in_order, bytes }) => {
                (PART, message, part, parts, in_order, bytes)
            }
            Self::End(messages) => (END, messages, 0, 0, false, &[][..]),
        };
        let mut datagram = Vec::with_capacity(HEADER_BYTES + bytes.len());
        datagram.extend([kind, in_order.into()]);
        datagram.extend(part.to_be_bytes());
        datagram.extend(parts.to_be_bytes());
        datagram.extend(message.to_be_bytes());
        datagram.extend(bytes);
        datagram
    }
}

/// Returns the number of parts of a message if each datagram has at most `datagram_bytes` bytes. `None` if there are
/// too many parts to number, or if a datagram is too small for any byte.
pub fn parts_of(message_bytes: usize, datagram_bytes: usize) -> Option<u16> {
    let room = datagram_bytes.checked_sub(HEADER_BYTES).filter(|room| *room > 0)?;
    if message_bytes > MESSAGE_MAX {
        return None;
    }
    u16::try_from(message_bytes.div_ceil(room).max(1)).ok()
}

/// Returns the part of a message that has this number, if each datagram has at most `datagram_bytes` bytes. `None` if
/// the message has no such part.
pub fn part(message: u32, bytes: &[u8], datagram_bytes: usize, part: u16) -> Option<MessagePart<'_>> {
    let parts = parts_of(bytes.len(), datagram_bytes)?;
    let room = datagram_bytes - HEADER_BYTES;
    let from = usize::from(part) * room;
    let bytes = bytes.get(from..bytes.len().min(from + room))?;
    (part < parts).then_some(MessagePart { message, part, parts, in_order: false, bytes })
}

/// Joins parts to messages.
#[derive(Debug, Default)]
pub struct Assembly {
    /// Incomplete messages, the oldest first.
    incomplete: VecDeque<IncompleteMessage>,
    bytes: usize,
    given_up: u64,
    seen: SeenMessages,
}

/// Remembers by one bit each whether the latest messages were completed or discarded.
#[derive(Debug)]
struct SeenMessages {
    /// One more than the highest number of a message that was completed or discarded, modulo 2^32.
    next: u32,
    done: [u64; SEEN as usize / 64],
}

/// A message that lacks some parts.
#[derive(Debug)]
struct IncompleteMessage {
    message: u32,
    parts: Vec<Option<Box<[u8]>>>,
    missing: usize,
    bytes: usize,
}

impl Assembly {
    /// Adds a part. Returns the message if this part completes it.
    pub fn take(&mut self, part: MessagePart<'_>) -> Option<Vec<u8>> {
        if self.seen.is_done(part.message) {
            return None;
        }
        if part.parts == 1 {
            self.seen.note(part.message);
            return Some(part.bytes.to_vec());
        }
        let at = self.place(&part)?;
        let found = self.incomplete.get_mut(at)?;
        let place = found.parts.get_mut(usize::from(part.part))?;
        // A part that arrives twice is ignored.
        if place.is_some() {
            return None;
        }
        *place = Some(part.bytes.into());
        found.missing -= 1;
        found.bytes += part.bytes.len();
        self.bytes += part.bytes.len();
        if found.bytes > MESSAGE_MAX {
            self.drop_at(at);
        } else if found.missing == 0 {
            return self.finish(at);
        }
        self.make_room();
        None
    }

    /// Returns how many messages were discarded as incomplete, although a part of them had arrived.
    pub fn given_up(&self) -> u64 {
        self.given_up
    }

    /// Discards all incomplete messages, since no more parts will arrive.
    pub fn end(&mut self) {
        while !self.incomplete.is_empty() {
            self.drop_at(0);
        }
    }

    /// Returns the index of the incomplete message that the part belongs to. The message is added if it is new.
    fn place(&mut self, part: &MessagePart<'_>) -> Option<usize> {
        if let Some(at) = self.incomplete.iter().position(|known| known.message == part.message) {
            // If two parts of a message state different numbers of parts, the message is discarded.
            let is_alike =
                self.incomplete.get(at).is_some_and(|known| known.parts.len() == usize::from(part.parts));
            if !is_alike {
                self.drop_at(at);
            }
            return is_alike.then_some(at);
        }
        let parts = vec![None; usize::from(part.parts)];
        let bytes = parts.len() * PLACE_BYTES;
        self.bytes += bytes;
        let missing = parts.len();
        self.incomplete.push_back(IncompleteMessage { message: part.message, parts, missing, bytes: 0 });
        self.make_room();
        // A single message never exceeds the limits of memory and of incomplete messages. So the message that was just
        // added was not discarded, and is the last one in `incomplete`.
        self.incomplete.len().checked_sub(1)
    }

    fn make_room(&mut self) {
        while self.incomplete.len() > INCOMPLETE_MAX || self.bytes > INCOMPLETE_BYTES {
            self.drop_at(0);
        }
    }

    fn drop_at(&mut self, at: usize) {
        if let Some(gone) = self.remove(at) {
            self.seen.note(gone.message);
            self.given_up += 1;
        }
    }

    fn remove(&mut self, at: usize) -> Option<IncompleteMessage> {
        let gone = self.incomplete.remove(at)?;
        self.bytes -= gone.bytes + gone.parts.len() * PLACE_BYTES;
        Some(gone)
    }

    fn finish(&mut self, at: usize) -> Option<Vec<u8>> {
        let whole = self.remove(at)?;
        self.seen.note(whole.message);
        Some(whole.parts.into_iter().flatten().flatten().collect())
    }
}

impl Default for SeenMessages {
    fn default() -> Self {
        Self { next: 0, done: [0; SEEN as usize / 64] }
    }
}

impl SeenMessages {
    fn place(message: u32) -> (usize, u64) {
        let at = message % SEEN;
        ((at / 64) as usize, 1 << (at % 64))
    }

    /// Returns whether a message is complete, discarded, or too far behind the newest.
    fn is_done(&self, message: u32) -> bool {
        // Numbers wrap around, so the sign of the difference tells which of two messages is newer.
        let ahead = message.wrapping_sub(self.next);
        if ahead.cast_signed() >= 0 {
            return false;
        }
        let (word, bit) = Self::place(message);
        ahead.wrapping_neg() > SEEN || self.done.get(word).is_none_or(|word| word & bit != 0)
    }

    fn note(&mut self, message: u32) {
        let ahead = message.wrapping_sub(self.next);
        if ahead.cast_signed() >= 0 {
            // Messages between the previous newest one and this one have not arrived yet, so their bits are cleared.
            for passed in 0..=ahead.min(SEEN - 1) {
                self.set(message.wrapping_sub(passed), false);
            }
            self.next = message.wrapping_add(1);
        }
        self.set(message, true);
    }

    fn set(&mut self, message: u32, done: bool) {
        let (word, bit) = Self::place(message);
        if let Some(word) = self.done.get_mut(word) {
            *word = if done { *word | bit } else { *word & !bit };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(message: u32, bytes: &[u8], room: usize) -> Vec<Vec<u8>> {
        let parts = parts_of(bytes.len(), room).expect("parts");
        let one = |at| MessageDatagram::Part(part(message, bytes, room, at).expect("a part")).write();
        (0..parts).map(one).collect()
    }

    fn feed(assembly: &mut Assembly, datagram: &[u8]) -> Option<Vec<u8>> {
        match MessageDatagram::read(datagram) {
            Some(MessageDatagram::Part(part)) => assembly.take(part),
            _ => None,
        }
    }

    #[test]
    fn message_parts_are_joined_in_any_order() {
        const ROOM: usize = HEADER_BYTES + 100;
        for length in [0_usize, 1, 99, 100, 101, 200, 12_345] {
            let bytes: Vec<u8> = (0..length).map(|at| at as u8).collect();
            let mut datagrams = all(7, &bytes, ROOM);
            assert!(datagrams.iter().all(|datagram| datagram.len() <= ROOM));
            assert_eq!(datagrams.len(), length.div_ceil(100).max(1));
            for _ in 0..2 {
                datagrams.reverse();
                let mut assembly = Assembly::default();
                let (last, first) = datagrams.split_last().expect("one");
                for datagram in first {
                    assert_eq!(feed(&mut assembly, datagram), None);
                    // A part that arrives twice is ignored.
                    assert_eq!(feed(&mut assembly, datagram), None);
                }
                assert_eq!(feed(&mut assembly, last).expect("whole"), bytes);
                assert_eq!((assembly.bytes, assembly.given_up), (0, 0));
            }
        }
    }

    /// Messages arrive in any order, with numbers that wrap around at 2^32. Each message arrives twice, and counts
    /// once.
    #[test]
    fn duplicate_message_is_returned_once() {
        for parts in [1, 3] {
            let mut assembly = Assembly::default();
            let mut take = |message: u32| {
                let bytes = [message as u8; 250];
                let room = HEADER_BYTES + bytes.len().div_ceil(parts);
                all(message, &bytes, room).iter().filter_map(|datagram| feed(&mut assembly, datagram)).count()
            };
            let numbers: Vec<u32> = (0..5000).map(|at: u32| at ^ 7).collect();
            for (at, number) in numbers.iter().enumerate() {
                assert_eq!(take(*number), 1, "{number}");
                assert_eq!(take(*number), 0, "{number}");
                assert_eq!(take(numbers[at.saturating_sub(1000)]), 0, "{number}");
            }
            assert_eq!(take(2951), 0, "far behind");
            // A message far ahead arrives first, and after it the messages with lower numbers.
            assert_eq!(take(9000), 1);
            assert_eq!((take(8999), take(8999)), (1, 0));
            assert_eq!((take(9000 - 2047), take(9000 - 2048)), (1, 0));
            assert_eq!((assembly.bytes, assembly.given_up), (0, 0));
        }
        let mut assembly = Assembly {
            seen: SeenMessages { next: u32::MAX - 1, ..SeenMessages::default() },
            ..Assembly::default()
        };
        for number in [u32::MAX, 1, 0, u32::MAX - 1] {
            let datagrams = all(number, b"x", 100);
            assert_eq!(feed(&mut assembly, &datagrams[0]).as_deref(), Some(&b"x"[..]), "{number}");
            assert_eq!(feed(&mut assembly, &datagrams[0]), None, "{number}");
        }
    }

    #[test]
    fn too_long_message_is_not_sent() {
        assert_eq!(parts_of(MESSAGE_MAX, 1400).map(usize::from), Some(MESSAGE_MAX.div_ceil(1390)));
        assert_eq!(parts_of(MESSAGE_MAX + 1, 1400), None);
        assert_eq!(parts_of(MESSAGE_MAX, HEADER_BYTES + 1), None, "more parts than are numbered");
        assert_eq!(parts_of(0, HEADER_BYTES), None);
        assert_eq!(part(0, &[1, 2, 3], HEADER_BYTES + 2, 2), None);
    }

    #[test]
    fn message_part_is_unchanged_after_encoding_and_decoding() {
        for in_order in [false, true] {
            let part =
                MessageDatagram::Part(MessagePart { message: 3, part: 0, parts: 1, in_order, bytes: b"x" });
            assert_eq!(MessageDatagram::read(&part.write()), Some(part));
        }
    }

    #[test]
    fn datagram_that_ends_a_session_contains_the_number_of_messages() {
        let end = MessageDatagram::End(0xdead_beef);
        assert_eq!(MessageDatagram::read(&end.write()), Some(end));
    }

    #[test]
    fn malformed_datagram_is_refused() {
        let part = MessageDatagram::Part(MessagePart {
            message: 1,
            part: 1,
            parts: 2,
            in_order: false,
            bytes: b"x",
        })
        .write();
        assert!(MessageDatagram::read(&part).is_some());
        // The test changes the header's bytes: the datagram's kind, the flag for order, the part's number and the
        // number of parts.
        for (at, value) in [(0, 0), (0, 3), (1, 2), (3, 2), (3, 9), (5, 0), (5, 1)] {
            let mut changed = part.clone();
            changed[at] = value;
            assert_eq!(MessageDatagram::read(&changed), None, "{at} {value}");
        }
        for length in 0..HEADER_BYTES {
            assert_eq!(MessageDatagram::read(&part[..length]), None);
        }
        assert_eq!(MessageDatagram::read(&part[..HEADER_BYTES]), None, "an empty part of two");
        let mut end = MessageDatagram::End(3).write();
        end.push(0);
        assert_eq!(MessageDatagram::read(&end), None);
    }

    /// A sender that sends only the first part of each message cannot fill the receiver's memory.
    #[test]
    fn number_and_bytes_of_incomplete_messages_are_bounded() {
        let mut assembly = Assembly::default();
        for message in 0..10_000 {
            let first = MessagePart { message, part: 0, parts: u16::MAX, in_order: false, bytes: &[7; 1400] };
            assert_eq!(assembly.take(first), None);
            assert!(assembly.bytes <= INCOMPLETE_BYTES && assembly.incomplete.len() <= INCOMPLETE_MAX);
        }
        assert_eq!(assembly.given_up as usize, 10_000 - assembly.incomplete.len());
        // The last part of this message never arrives.
        let mut assembly = Assembly::default();
        for at in 0..u16::MAX - 1 {
            assert_eq!(
                assembly.take(MessagePart {
                    message: 1,
                    part: at,
                    parts: u16::MAX,
                    in_order: false,
                    bytes: &[7; 1400]
                }),
                None
            );
            assert!(assembly.bytes <= INCOMPLETE_BYTES);
        }
        assert!(assembly.given_up > 0);
        assembly.end();
        assert_eq!(assembly.bytes, 0);
    }

    #[test]
    fn message_whose_number_of_parts_changes_is_dropped() {
        let mut assembly = Assembly::default();
        assert_eq!(
            assembly.take(MessagePart { message: 1, part: 0, parts: 2, in_order: false, bytes: b"a" }),
            None
        );
        assert_eq!(
            assembly.take(MessagePart { message: 1, part: 1, parts: 3, in_order: false, bytes: b"b" }),
            None
        );
        assert_eq!((assembly.bytes, assembly.given_up), (0, 1));
    }
}
