/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Messages over grafts: an application says what it needs, the daemons of both hosts agree on a transport that has it.
 *
 *	millrace_graft_session *session;
 *
 *	if (millrace_graft_init(NULL, "station", "telemetry", &session) ||
 *	    millrace_graft_negotiate(session, "reliability", NULL) ||
 *	    millrace_graft_validate(session, 10000))
 *		errx(1, "%s", millrace_graft_error());
 *	millrace_graft_send(session, "a message", 9);
 *	millrace_graft_close(session);
 *
 * No privilege is needed: the settings of the host's daemon (`millrace graft packets run`, [[peer]]) say which users may. docs/messages.md
 * is the guide.
 *
 * Functions return 0 or a negative millrace_graft_status, and then leave their results untouched. A session, or a listener, is used by
 * one thread at a time; different ones by different threads at any time. The library neither exits, prints, installs signal handlers,
 * starts threads nor lets a panic out.
 *
 * A session belongs to the process that opened it. In a child that was forked every call says MILLRACE_GRAFT_FORKED, but close,
 * which gives the child's descriptors back and leaves the parent's session as it is. exec closes them.
 */
#ifndef MILLRACE_GRAFT_H
#define MILLRACE_GRAFT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Of this header. The soname changes whenever a program would have to be compiled anew. */
#define MILLRACE_GRAFT_ABI 0

#define MILLRACE_GRAFT_MESSAGE_MAX 1048576 /* bytes */
#define MILLRACE_GRAFT_NAME_MAX	   64	   /* bytes, the terminating zero included */
#define MILLRACE_GRAFT_TEXT_MAX	   256

typedef struct millrace_graft_session millrace_graft_session;
typedef struct millrace_graft_listener millrace_graft_listener;

typedef enum millrace_graft_status {
	MILLRACE_GRAFT_OK = 0,
	MILLRACE_GRAFT_INVALID = -1,	/* an argument: null, not UTF-8, out of its range */
	MILLRACE_GRAFT_NO_DAEMON = -2,	/* nobody answers on the socket */
	MILLRACE_GRAFT_REFUSED = -3,	/* by either daemon; millrace_graft_error() has the reason */
	MILLRACE_GRAFT_NOT_AGREED = -4, /* nothing is sent before both ends have agreed */
	MILLRACE_GRAFT_AGAIN = -5,	/* it would have to wait, and is not to */
	MILLRACE_GRAFT_TIMED_OUT = -6,
	MILLRACE_GRAFT_TOO_LONG = -7, /* a message that is sent, or one that has more bytes than there is room for */
	MILLRACE_GRAFT_FINISHED = -8, /* this end has finished; from recv: the other one has, and nothing more comes */
	MILLRACE_GRAFT_OVER = -9,     /* the session is over */
	MILLRACE_GRAFT_FORKED = -10,  /* it is the parent's */
	MILLRACE_GRAFT_SYSTEM = -11,  /* a socket refused */
	MILLRACE_GRAFT_INTERNAL = -12,	/* a fault of the library */
	MILLRACE_GRAFT_INCOMPLETE = -13 /* of a stream: the other end has finished, and not all has come */
} millrace_graft_status;

/* Bits of millrace_graft_qos.asked. */
#define MILLRACE_GRAFT_MAX_DELAY      1u
#define MILLRACE_GRAFT_MIN_THROUGHPUT 2u
#define MILLRACE_GRAFT_MAX_LOSS	      4u
#define MILLRACE_GRAFT_ADAPT	      8u /* another graft may come where this one does not keep to it */

typedef struct millrace_graft_qos {
	uint32_t asked;	       /* which of the others count */
	uint32_t max_delay_ms; /* one way */
	double min_throughput_mbit;
	double max_loss_percent;
} millrace_graft_qos;

typedef enum millrace_graft_event_kind {
	MILLRACE_GRAFT_EVENT_CHANGED = 1,  /* text: the graft that both ends use now */
	MILLRACE_GRAFT_EVENT_REFUSED = 2,  /* a renegotiation; text: why */
	MILLRACE_GRAFT_EVENT_VIOLATED = 3, /* text: max_delay, min_throughput or max_loss; asked, measured */
	MILLRACE_GRAFT_EVENT_LOST = 4,	   /* messages: those that came in part only */
	MILLRACE_GRAFT_EVENT_FINISHED = 5, /* the other end sends no more */
	MILLRACE_GRAFT_EVENT_CLOSED = 6	   /* the session is over; text: why. What has come can be read */
} millrace_graft_event_kind;

typedef struct millrace_graft_event {
	int32_t kind;
	uint32_t reserved;
	uint64_t messages;
	double asked; /* ms, Mbit/s or per cent */
	double measured;
	char text[MILLRACE_GRAFT_TEXT_MAX];
} millrace_graft_event;

typedef struct millrace_graft_agreed {
	char graft[MILLRACE_GRAFT_NAME_MAX];
	char services[MILLRACE_GRAFT_TEXT_MAX]; /* separated by spaces */
	uint8_t is_sealed;
	uint8_t reserved[7];
} millrace_graft_agreed;

/* "0.1.0", of the library. */
const char *millrace_graft_version(void);

/* Why the latest call of this thread failed. Good until its next call. */
const char *millrace_graft_error(void);

/* --- A session --- */

/* With a peer of the daemon's settings, for a service by its name. `socket`: the daemon's; NULL: /run/millrace/messages.sock. */
int millrace_graft_init(const char *socket, const char *peer, const char *service,
			millrace_graft_session **session);

/* Asks for it. `services`: names separated by spaces, or NULL; `qos` may be NULL. Does not wait. */
int millrace_graft_negotiate(millrace_graft_session *session, const char *services,
			     const millrace_graft_qos *qos);

/* Until both ends have agreed. A negative `timeout_ms`: however long that takes. */
int millrace_graft_validate(millrace_graft_session *session, int timeout_ms);

/* What they have agreed on. */
int millrace_graft_agreement(millrace_graft_session *session, millrace_graft_agreed *agreed);

/* A message of at most MILLRACE_GRAFT_MESSAGE_MAX bytes. Where the window is full it waits, or says MILLRACE_GRAFT_AGAIN and has taken
 * nothing of it.
 */
int millrace_graft_send(millrace_graft_session *session, const void *message, size_t bytes);

/* The next message. One that has more bytes than `room` stays for the next call, and `bytes` says how many. */
int millrace_graft_recv(millrace_graft_session *session, void *message, size_t room, size_t *bytes);

/* The same session as a stream of bytes, at both ends, where its graft has reliability and order: else MILLRACE_GRAFT_INVALID. `written` may
 * be less than `bytes`, as of write(2); `read` has 0 bytes when the other end has finished and all has come.
 */
int millrace_graft_write(millrace_graft_session *session, const void *from, size_t bytes, size_t *written);
int millrace_graft_read(millrace_graft_session *session, void *to, size_t room, size_t *bytes);

/* Other services or another quality, in the middle of the traffic. An event says what came of it. */
int millrace_graft_renegotiate(millrace_graft_session *session, const char *services,
			       const millrace_graft_qos *qos);

/* What has become of the session; MILLRACE_GRAFT_AGAIN: nothing new. */
int millrace_graft_next_event(millrace_graft_session *session, millrace_graft_event *event);

/* This end sends no more; the other one may go on. */
int millrace_graft_finish(millrace_graft_session *session);

/* Finishes, and frees it. NULL does nothing. */
int millrace_graft_close(millrace_graft_session *session);

/* Readable when a message has come, an event, or time for another try: then call recv, next_event and send until they have nothing. It is
 * the session's: neither read it nor close it.
 */
int millrace_graft_fd(const millrace_graft_session *session);

/* Not 0: calls say MILLRACE_GRAFT_AGAIN instead of waiting. */
int millrace_graft_set_nonblocking(millrace_graft_session *session, int nonblocking);

/* Longer than that no call waits; negative: however long it takes. */
int millrace_graft_set_timeout(millrace_graft_session *session, int timeout_ms);

/* --- A listener --- */

/* Sessions that the peer opens for this service. */
int millrace_graft_listen(const char *socket, const char *peer, const char *service,
			  millrace_graft_listener **listener);

/* The next one, agreed on. */
int millrace_graft_accept(millrace_graft_listener *listener, millrace_graft_session **session);

int millrace_graft_listener_fd(const millrace_graft_listener *listener);
int millrace_graft_listener_set_nonblocking(millrace_graft_listener *listener, int nonblocking);

/* Sessions that it has accepted go on. NULL does nothing. */
void millrace_graft_listener_close(millrace_graft_listener *listener);

#ifdef __cplusplus
}
#endif

#endif
