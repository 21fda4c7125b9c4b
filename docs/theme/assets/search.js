// Material's search takes each word as the beginning of one, and -, + and other marks as operators. So "of" finds
// "offload", and --gpus-per-node finds nothing. Here a query is made fit for it on the way to its worker, and gets the
// pages' spelling of what users spell in several ways.
const QUERY = 2 // the type of Material's messages that have a query
const COMMON = /^(an?|and|are|as|at|be|but|by|can|for|from|got|has|have|if|in|is|it|its|must|not?|of|on|or|so|the|this|to|was|were|with)$/i

const SPELLINGS = [[/\bmultinode\b/gi, "multi-node"], [/\b2(?=[ -](nodes?|machines?)\b)/gi, "two"]]

function plain(query) {
  query = SPELLINGS.reduce((text, [theirs, ours]) => text.replace(theirs, ours), query)
  const words = query.split(/\s+/).map((word) => word.replace(/^[^\w"]+(?=[\w"])/, ""))
  // Of a message, the words: numbers in it are values.
  const telling = words.filter((word) => !COMMON.test(word) && (words.length < 5 || /[a-z]{3}/i.test(word)))
  return (telling.length ? telling : words).join(" ")
}

const post = Worker.prototype.postMessage
Worker.prototype.postMessage = function (message, ...others) {
  return post.call(this, message?.type === QUERY ? { ...message, data: plain(message.data) } : message, ...others)
}
