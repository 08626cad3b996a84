// Replaces an Opus decoder for browsers without one, which has another licence than this project.
throw new Error("this browser cannot decode Opus");
export {};
