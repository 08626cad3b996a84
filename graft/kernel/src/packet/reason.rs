//! Reasons for the dispatcher's verdict on packets.

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $text:literal),* $(,)?) => {
        /// Why the dispatcher passed or dropped a packet (`enum graft_reason` in `bpf/graft_packet.h`).
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum PacketReason { $($(#[$doc])* $name),* }

        impl PacketReason {
            /// The reasons, in the order of their numbers.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Returns the reason's name in status and documentation.
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text),* }
            }
        }
    };
}

reasons! {
    /// The packet belongs to no session.
    Other = "other",
    /// The packet left with its frame.
    Sent = "sent",
    /// A packet of the functions or of the daemon left: a request, an acknowledgement, a repetition, or the copy of a packet that parity
    /// packets follow.
    SentByUs = "sent-by-us",
    /// The packet passed XDP.
    LetIn = "let-in",
    /// The application gets the packet, without its frame.
    Delivered = "delivered",
    /// The application gets a packet that was recovered from parity packets.
    Recovered = "recovered",
    /// A parity packet left, after the packets that it protects.
    Protected = "protected",
    /// A function of the list did not exist: the packet passed with its frame only.
    NoFunction = "no-function",
    /// A request became the packet that it asked for, or the answer that the packet is gone.
    Resent = "resent",
    /// The packet ended here: a request for a packet that is not needed, an acknowledgement, a superfluous parity packet, or a message
    /// between the daemons.
    Answered = "answered",
    /// The packet has no frame of this version: the other end has no such session.
    Malformed = "malformed",
    /// The packet's frame was not made with the session's key.
    Forged = "forged",
    /// The packet has another list of functions: the settings of both ends differ, or one end was started again a moment ago.
    Stale = "stale",
    /// The packet came before.
    Duplicate = "duplicate",
    /// The packet is more than 1024 numbers behind, so it may have come before.
    Old = "old",
    /// The packet came after one that was sent later (`order`), or after it had been given up (`partial`).
    Late = "late",
    /// The packet was not sent: with its frame, and encrypted, it is too long for the interface.
    TooLong = "too-long",
    /// Several datagrams came in one buffer: the application's socket has UDP_SEGMENT or UDP_GRO.
    Merged = "merged",
    /// The kernel had no memory for the packet.
    NoRoom = "no-room",
    /// The ends of the encrypted session have not agreed on keys yet, or not on these.
    NoKeys = "no-keys",
    /// The packet was encrypted with another key, or changed on the way.
    Unopened = "unopened",
    /// The encrypted packet came before, or is too old to tell.
    Replayed = "replayed",
    /// The packet may belong to an encrypted session, but came in fragments or behind more than four extension headers of IPv6.
    Fragment = "fragment",
    /// The packet was not sent, because the window is full.
    WindowFull = "window-full",
    /// The packet came before one that is missing, at a function that delivers in order only (`gobackn`).
    OutOfTurn = "out-of-turn",
    /// The packet was not sent, because the session was about to start again.
    Paused = "paused",
    /// The packet was not sent, because too many packets wait for their turn (`pace`).
    TooFast = "too-fast",
    /// The application's socket has no room. The packet counts as missing, and functions that repair ask for it again.
    SocketFull = "socket-full",
    /// The packet came by UDP although the session has protocol 253, or vice versa.
    OtherProtocol = "other-protocol",
    /// The packet was not sent, because the interface of its path does not exist.
    NoPath = "no-path",
}
