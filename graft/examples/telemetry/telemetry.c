/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Sends lines of text as messages to a peer, and prints a peer's messages as lines.
 *
 *	telemetry [-s SOCKET] listen PEER
 *	telemetry [-s SOCKET] send PEER [SERVICES [MAX_DELAY_MS]]
 *
 * Both commands wait for all events in one poll(), as a program with an event loop does.
 */
#include <millrace_messages.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SERVICE "telemetry"

static int fail(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, millrace_messages_error());
	return 1;
}

static void tell(const millrace_messages_event *event)
{
	switch (event->kind) {
	case MILLRACE_MESSAGES_EVENT_CHANGED:
		fprintf(stderr, "both ends use graft %s now\n", event->text);
		break;
	case MILLRACE_MESSAGES_EVENT_VIOLATED:
		fprintf(stderr, "%s: %g was asked for, and it is %g\n", event->text, event->asked,
			event->measured);
		break;
	case MILLRACE_MESSAGES_EVENT_LOST:
		fprintf(stderr, "%llu messages came in part only\n", (unsigned long long)event->messages);
		break;
	case MILLRACE_MESSAGES_EVENT_REFUSED:
	case MILLRACE_MESSAGES_EVENT_CLOSED:
		fprintf(stderr, "%s\n", event->text);
		break;
	}
}

/* Prints all messages of a session, until the other host has finished sending. */
static int print_all(millrace_messages_session *session)
{
	struct pollfd wait = {.fd = millrace_messages_fd(session), .events = POLLIN};
	static char message[MILLRACE_MESSAGES_MESSAGE_MAX];
	millrace_messages_event event;
	size_t bytes;
	int status;

	/* Non-blocking calls return MILLRACE_MESSAGES_AGAIN instead of waiting, so the loop waits only in poll().
	 */
	millrace_messages_set_nonblocking(session, 1);
	for (;;) {
		while ((status = millrace_messages_recv(session, message, sizeof(message), &bytes)) ==
		       MILLRACE_MESSAGES_OK) {
			fwrite(message, 1, bytes, stdout);
			putchar('\n');
			fflush(stdout);
		}
		while (millrace_messages_next_event(session, &event) == MILLRACE_MESSAGES_OK)
			tell(&event);
		if (status == MILLRACE_MESSAGES_FINISHED)
			return 0;
		if (status != MILLRACE_MESSAGES_AGAIN)
			return fail("recv");
		poll(&wait, 1, -1);
	}
}

static int listen_to(const char *socket, const char *peer)
{
	millrace_messages_listener *listener;
	millrace_messages_session *session;
	int failed;

	if (millrace_messages_listen(socket, peer, SERVICE, &listener))
		return fail("listen");
	fprintf(stderr, "listening\n");
	if (millrace_messages_accept(listener, &session))
		return fail("accept");
	failed = print_all(session);
	millrace_messages_close(session);
	millrace_messages_listener_close(listener);
	return failed;
}

static int send_lines(const char *socket, const char *peer, const char *services,
		      const millrace_messages_qos *qos)
{
	millrace_messages_session *session;
	millrace_messages_agreed agreed;
	millrace_messages_event event;
	char *line = NULL;
	size_t room = 0;
	ssize_t length;
	int failed = 0;

	if (millrace_messages_init(socket, peer, SERVICE, &session))
		return fail("init");
	/* millrace_messages_negotiate() requests a session with these services (such as retransmission).
	 * millrace_messages_validate() waits at most 10 s until both hosts have agreed.
	 */
	if (millrace_messages_negotiate(session, services, qos) ||
	    millrace_messages_validate(session, 10000)) {
		failed = fail("negotiate");
		millrace_messages_close(session);
		return failed;
	}
	if (!millrace_messages_agreement(session, &agreed))
		fprintf(stderr, "graft %s: %s, %s\n", agreed.graft, agreed.services,
			agreed.is_sealed ? "sealed" : "in clear");
	while (!failed && (length = getline(&line, &room, stdin)) > 0) {
		/* A message is the line without its newline. */
		if (line[length - 1] == '\n')
			length--;
		if (millrace_messages_send(session, line, (size_t)length))
			failed = fail("send");
		while (millrace_messages_next_event(session, &event) == MILLRACE_MESSAGES_OK)
			tell(&event);
	}
	free(line);
	/* An error of close means that the peer may lack some of the messages. */
	if (millrace_messages_close(session))
		failed = fail("close");
	return failed;
}

int main(int argc, char **argv)
{
	millrace_messages_qos qos = {0};
	const char *socket = NULL;

	if (argc > 2 && !strcmp(argv[1], "-s")) {
		socket = argv[2];
		argc -= 2;
		argv += 2;
	}
	if (argc == 3 && !strcmp(argv[1], "listen"))
		return listen_to(socket, argv[2]);
	if (argc >= 3 && argc <= 5 && !strcmp(argv[1], "send")) {
		if (argc == 5) {
			qos.asked = MILLRACE_MESSAGES_MAX_DELAY;
			qos.max_delay_ms = (uint32_t)strtoul(argv[4], NULL, 10);
		}
		return send_lines(socket, argv[2], argc > 3 ? argv[3] : NULL, &qos);
	}
	fprintf(stderr, "telemetry [-s SOCKET] listen PEER | send PEER [SERVICES [MAX_DELAY_MS]]\n");
	return 2;
}
