//! Reasons why the dispatcher of packet grafts passes or drops packets.

use millrace_kernel::outcomes;

outcomes! {
    /// The reason why the dispatcher passed or dropped a packet (`enum graft_reason` in `bpf/graft_packet.h`).
    PacketReason {
        /// The packet belongs to no session.
        Other = "other",
        /// The packet was sent with its frame.
        Sent = "sent",
        /// A packet that functions or the daemon made was sent: a request, an acknowledgement, a retransmission, or the
        /// copy of a packet that parity packets follow.
        SentByUs = "sent-by-us",
        /// The packet functions at XDP accepted the incoming packet.
        LetIn = "let-in",
        /// The packet was delivered to the application, without its frame.
        Delivered = "delivered",
        /// A packet that was recovered from parity packets was delivered to the application.
        Recovered = "recovered",
        /// A parity packet was sent, behind the packets that it protects.
        Protected = "protected",
        /// A function of the session's list is not loaded. The packet passed, and only its frame was added or removed.
        NoFunction = "no-function",
        /// A request was answered with the requested packet, or with the message that it is no longer stored.
        Resent = "resent",
        /// The packet was meant for this host's graft and not for the application: a request for a packet that the peer
        /// already has, an acknowledgement, a superfluous parity packet, or a message between the daemons.
        Answered = "answered",
        /// The packet has no graft frame of this version, so the peer probably has no such session.
        Malformed = "malformed",
        /// The packet's frame was not made with the session's key.
        Forged = "forged",
        /// The packet names another list of functions: the settings of both hosts differ, or one host has just
        /// restarted the session.
        Stale = "stale",
        /// The packet was received before.
        Duplicate = "duplicate",
        /// The packet is more than 1024 packet numbers behind the newest, so it may have been received before.
        Old = "old",
        /// The packet arrived after one that was sent later (function `order`), or after the receiver had stopped
        /// expecting it (function `partial`).
        Late = "late",
        /// The packet was not sent, since with its frame and encryption it is too long for the interface.
        TooLong = "too-long",
        /// One socket buffer contained several datagrams, since the application's socket uses UDP_SEGMENT or UDP_GRO.
        Merged = "merged",
        /// The kernel had no memory for the packet.
        NoRoom = "no-room",
        /// Both hosts of the encrypted session have not agreed on keys yet, or the packet names other keys.
        NoKeys = "no-keys",
        /// The packet was encrypted with another key, or changed on the way.
        Unopened = "unopened",
        /// The encrypted packet was received before, or is too old to tell whether it was.
        Replayed = "replayed",
        /// The packet may belong to an encrypted session, but was fragmented, or had more than four IPv6 extension
        /// headers.
        Fragment = "fragment",
        /// The packet was not sent, because the largest allowed number of packets is in flight.
        WindowFull = "window-full",
        /// The packet arrived while an earlier one is missing, and a function delivers in order only (`gobackn`).
        OutOfTurn = "out-of-turn",
        /// The packet was not sent, because the session was about to restart.
        Paused = "paused",
        /// The packet was not sent, because too many packets wait for their departure time (`pace`).
        TooFast = "too-fast",
        /// The application's socket has no buffer space. The packet counts as missing, and functions that retransmit
        /// request it again.
        SocketFull = "socket-full",
        /// The packet was not sent, because the interface of its network path does not exist.
        NoPath = "no-path",
    }
}
