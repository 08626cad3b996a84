/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Messages over packet functions in the kernel: an application states the transport services that it needs, and the
 * daemons of both hosts agree on a graft, a list of packet functions, that provides them.
 *
 *	millrace_messages_session *session;
 *
 *	if (millrace_messages_init(NULL, "station", "telemetry", &session) ||
 *	    millrace_messages_negotiate(session, "reliability", NULL) ||
 *	    millrace_messages_validate(session, 10000))
 *		errx(1, "%s", millrace_messages_error());
 *	millrace_messages_send(session, "a message", 9);
 *	millrace_messages_close(session);
 *
 * No privilege is needed: the settings of the host's daemon (`millrace graft run`, [[peer]]) name the users
 * that are allowed. docs/guide/messages.md is the guide.
 *
 * Functions return 0, or a negative millrace_messages_status if they fail. A function that fails writes nothing to its
 * output arguments. One session or listener may be used by one thread at a time, and different ones by different
 * threads at any time. The library does not exit, print, install signal handlers, start threads or let a panic out.
 *
 * A session belongs to the process that opened it. In a forked child every call returns MILLRACE_MESSAGES_FORKED,
 * except close, which closes the child's descriptors and leaves the parent's session as it is. exec closes them, too.
 */
#ifndef MILLRACE_MESSAGES_H
#define MILLRACE_MESSAGES_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Version of the library's ABI. The soname changes with it, whenever programs have to be compiled again. */
#define MILLRACE_MESSAGES_ABI 0

#define MILLRACE_MESSAGES_MESSAGE_MAX 1048576 /* longest message, in bytes */
#define MILLRACE_MESSAGES_NAME_MAX    64      /* longest name of a peer, service or graft, with its final zero byte */
#define MILLRACE_MESSAGES_TEXT_MAX    256

typedef struct millrace_messages_session millrace_messages_session;
typedef struct millrace_messages_listener millrace_messages_listener;

typedef enum millrace_messages_status {
	MILLRACE_MESSAGES_OK = 0,
	MILLRACE_MESSAGES_INVALID = -1,	   /* an argument is null, not UTF-8 or out of range */
	MILLRACE_MESSAGES_NO_DAEMON = -2,  /* no daemon answers on the socket */
	MILLRACE_MESSAGES_REFUSED = -3,	   /* a daemon refused; millrace_messages_error() says why */
	MILLRACE_MESSAGES_NOT_AGREED = -4, /* both hosts have not agreed on the session yet */
	MILLRACE_MESSAGES_AGAIN = -5,	   /* the call would have to wait; the session is nonblocking */
	MILLRACE_MESSAGES_TIMED_OUT = -6,
	/* the message is too long to send, or for the caller's buffer */
	MILLRACE_MESSAGES_TOO_LONG = -7,
	/* this side sends no more; from recv: the other side sends no more, and all its messages arrived */
	MILLRACE_MESSAGES_FINISHED = -8,
	MILLRACE_MESSAGES_OVER = -9,	   /* the session is over */
	MILLRACE_MESSAGES_FORKED = -10,	   /* this process is forked; the session belongs to its parent */
	MILLRACE_MESSAGES_SYSTEM = -11,	   /* a socket call failed */
	MILLRACE_MESSAGES_INTERNAL = -12,  /* internal error of the library */
	/* the other side has ended the stream, but data is missing */
	MILLRACE_MESSAGES_INCOMPLETE = -13
} millrace_messages_status;

/* Bits of millrace_messages_qos.asked, which select the fields of millrace_messages_qos that apply. */
#define MILLRACE_MESSAGES_MAX_DELAY	 1u
#define MILLRACE_MESSAGES_MIN_THROUGHPUT 2u
#define MILLRACE_MESSAGES_MAX_LOSS	 4u
/* the daemons may change to another graft if the present one does not provide the requested quality */
#define MILLRACE_MESSAGES_ADAPT 8u

typedef struct millrace_messages_qos {
	/* the bits MILLRACE_MESSAGES_MAX_DELAY, ..., which select the fields of this struct that apply */
	uint32_t asked;
	uint32_t max_delay_ms; /* longest delay in one direction */
	double min_throughput_mbit;
	double max_loss_percent;
} millrace_messages_qos;

typedef enum millrace_messages_event_kind {
	MILLRACE_MESSAGES_EVENT_CHANGED = 1, /* both hosts use the graft named in `text` now */
	MILLRACE_MESSAGES_EVENT_REFUSED = 2, /* a renegotiation failed; `text` has the reason */
	/* the quality named in `text` is not met; `asked` and `measured` have its values */
	MILLRACE_MESSAGES_EVENT_VIOLATED = 3,
	MILLRACE_MESSAGES_EVENT_LOST = 4, /* messages were abandoned; `messages` is their number */
	MILLRACE_MESSAGES_EVENT_FINISHED = 5, /* the other side sends no more messages */
	/* the session is over; `text` has the reason. Messages that have arrived can still be read. */
	MILLRACE_MESSAGES_EVENT_CLOSED = 6
} millrace_messages_event_kind;

typedef struct millrace_messages_event {
	int32_t kind;
	uint32_t reserved;
	uint64_t messages;
	double asked; /* requested value of the quality, in ms, Mbit/s or per cent */
	double measured;
	char text[MILLRACE_MESSAGES_TEXT_MAX];
} millrace_messages_event;

typedef struct millrace_messages_agreed {
	char graft[MILLRACE_MESSAGES_NAME_MAX];
	char services[MILLRACE_MESSAGES_TEXT_MAX]; /* names of the graft's services, separated by spaces */
	uint8_t is_sealed;
	uint8_t reserved[7];
} millrace_messages_agreed;

/* Returns the version of the library, such as "0.1.0". */
const char *millrace_messages_version(void);

/* Returns why the latest call of this thread failed. The text is valid until this thread's
 * next call.
 */
const char *millrace_messages_error(void);

/* --- A session --- */

/* Creates a session with the host `peer`, a name in the daemon's settings, for the service of this name.
 * `socket` is the path of the daemon's socket; NULL stands for /run/millrace/messages.sock.
 */
int millrace_messages_init(const char *socket, const char *peer, const char *service,
			   millrace_messages_session **session);

/* Requests the session from the daemon without waiting. `services` has names separated by spaces, or is NULL;
 * `qos` may be NULL.
 */
int millrace_messages_negotiate(millrace_messages_session *session, const char *services,
				const millrace_messages_qos *qos);

/* Waits until both hosts have agreed on the session. A negative `timeout_ms` means no limit. */
int millrace_messages_validate(millrace_messages_session *session, int timeout_ms);

/* Returns the graft and services that both hosts have agreed on. */
int millrace_messages_agreement(millrace_messages_session *session, millrace_messages_agreed *agreed);

/* Sends a message of at most MILLRACE_MESSAGES_MESSAGE_MAX bytes. If the session's flow-control window is full, the
 * call waits. In a nonblocking session it returns MILLRACE_MESSAGES_AGAIN instead, and has sent no part of the message.
 */
int millrace_messages_send(millrace_messages_session *session, const void *message, size_t bytes);

/* Receives the next message. If the message is longer than `room` bytes, it is not consumed, and `bytes` is
 * set to its length.
 */
int millrace_messages_recv(millrace_messages_session *session, void *message, size_t room, size_t *bytes);

/* Write to the session and read from it as a stream of bytes. Both sides have to do so. The graft needs reliability
 * and order: otherwise both calls return MILLRACE_MESSAGES_INVALID. `written` may be less than `bytes`, as with
 * write(2). At the end of the stream, `read` returns 0 bytes.
 */
int millrace_messages_write(millrace_messages_session *session, const void *from, size_t bytes,
			    size_t *written);
int millrace_messages_read(millrace_messages_session *session, void *to, size_t room, size_t *bytes);

/* Requests other services or another quality during the session. An event reports the result. */
int millrace_messages_renegotiate(millrace_messages_session *session, const char *services,
				  const millrace_messages_qos *qos);

/* Returns the next event of the session, or MILLRACE_MESSAGES_AGAIN if there is none. */
int millrace_messages_next_event(millrace_messages_session *session, millrace_messages_event *event);

/* Ends this side of the session, which sends no more messages. The other side may continue to send. */
int millrace_messages_finish(millrace_messages_session *session);

/* Ends this side of the session, then closes and frees the session. NULL does nothing. */
int millrace_messages_close(millrace_messages_session *session);

/* Returns a descriptor that is readable when a message or an event has arrived, or when a call that returned
 * MILLRACE_MESSAGES_AGAIN should be repeated. Then call recv, next_event and send until they return
 * MILLRACE_MESSAGES_AGAIN. The descriptor belongs to the session: neither read it nor close it.
 */
int millrace_messages_fd(const millrace_messages_session *session);

/* Sets whether calls return MILLRACE_MESSAGES_AGAIN instead of waiting. */
int millrace_messages_set_nonblocking(millrace_messages_session *session, int nonblocking);

/* Limits how long each call waits. A negative `timeout_ms` means no limit. */
int millrace_messages_set_timeout(millrace_messages_session *session, int timeout_ms);

/* --- A listener --- */

/* Listens for sessions that the peer opens for this service. */
int millrace_messages_listen(const char *socket, const char *peer, const char *service,
			     millrace_messages_listener **listener);

/* Accepts the next session that the peer has opened and both hosts have agreed on. */
int millrace_messages_accept(millrace_messages_listener *listener, millrace_messages_session **session);

int millrace_messages_listener_fd(const millrace_messages_listener *listener);
int millrace_messages_listener_set_nonblocking(millrace_messages_listener *listener, int nonblocking);

/* Stops listening, and frees the listener. Accepted sessions stay open. NULL does nothing. */
void millrace_messages_listener_close(millrace_messages_listener *listener);

#ifdef __cplusplus
}
#endif

#endif
