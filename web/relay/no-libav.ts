// Replaces the Opus decoder of @moq/watch for browsers without one, because its licence differs from this project's.
throw new Error("this browser cannot decode Opus");
export {};
