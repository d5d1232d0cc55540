// The name of a conversation is its beginning.

export const titleOf = (text) => text?.trim().replaceAll(/\s+/g, " ").slice(0, 80) || "New chat";
