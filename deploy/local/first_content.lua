-- The instant of an event stream's first content, written to dynamic metadata for the access log.
--
-- Place in the flow: an Envoy Lua filter, response path. It reads body chunks only until the first event that carries
-- generated content (text, reasoning, refusal, tool call, audio), writes the wall clock in microseconds under
-- leadtime_lua/first_us and returns: no later chunk enters Lua, the bytes are never touched. shared/labels.py answers
-- the same question for streams that pass through Python; a test runs one corpus through both.
--
-- Limits: only 200 with an event-stream body that isn't encoded. Nothing found leaves leadtime_lua/skip with a reason
-- (encoded, too_long, none), never a guess. An error in here costs one sample and no byte of the answer.

local NAMESPACE = "leadtime_lua"
local FIRST_CONTENT = "first_us"
local SKIP = "skip"
local MAX_BYTES_BEFORE_CONTENT = 1048576
local MAX_LINE_BYTES = 65536
local KEPT_OF_A_LONG_LINE = 256

-- Keys whose value is generated text: content if the string is not empty. A quote inside a JSON string is written \",
-- so a key that is only quoted by the model (\"content\":) never matches.
local TEXT_KEYS = {
  "content", "reasoning_content", "reasoning", "refusal", -- chat completions
  "text",                                                 -- completions; text blocks of Anthropic's stream
  "delta",                                                -- responses: the delta itself is the text
  "thinking", "partial_json",                             -- Anthropic's other deltas
}

local PATTERNS = {}
for _, key in ipairs(TEXT_KEYS) do
  PATTERNS[#PATTERNS + 1] = '"' .. key .. '"%s*:%s*"[^"]'
end
PATTERNS[#PATTERNS + 1] = '"tool_calls"%s*:%s*%[%s*{'
PATTERNS[#PATTERNS + 1] = '"function_call"%s*:%s*{'
PATTERNS[#PATTERNS + 1] = '"audio"%s*:%s*{'
PATTERNS[#PATTERNS + 1] = '"type"%s*:%s*"tool_use"'

-- Only data lines count: a keep-alive comment may hold anything.
local function carries_content(line)
  if line:sub(1, 5) ~= "data:" then
    return false
  end
  for _, pattern in ipairs(PATTERNS) do
    if line:find(pattern) then
      return true
    end
  end
  return false
end

-- The metadata object dies at every yield of the body iterator, so it is fetched for each write.
local function note(handle, key, value)
  handle:streamInfo():dynamicMetadata():set(NAMESPACE, key, value)
end

-- Whether one of the complete lines carries content, and the unfinished rest. Chunks are network reads, not events.
local function scan(text)
  local from = 1
  local stop = text:find("[\r\n]", from)
  while stop do
    if carries_content(text:sub(from, stop - 1)) then
      return true, ""
    end
    from = stop + 1
    stop = text:find("[\r\n]", from)
  end
  local rest = text:sub(from)
  if #rest > MAX_LINE_BYTES then
    if carries_content(rest) then
      return true, ""
    end
    if rest:sub(1, 5) == "data:" then
      rest = "data:" .. rest:sub(-KEPT_OF_A_LONG_LINE)
    else
      rest = ":"
    end
  end
  return false, rest
end

function envoy_on_response(handle)
  local headers = handle:headers()
  local kind = headers:get("content-type")
  if headers:get(":status") ~= "200" or not kind or not kind:lower():find("text/event-stream", 1, true) then
    return
  end
  local encoding = headers:get("content-encoding")
  if encoding and encoding ~= "identity" then
    note(handle, SKIP, "encoded")
    return
  end
  local rest = ""
  local seen_bytes = 0
  for chunk in handle:bodyChunks() do
    local length = chunk:length()
    if length > 0 then
      local found
      found, rest = scan(rest .. chunk:getBytes(0, length))
      if found then
        note(handle, FIRST_CONTENT, handle:timestampString(EnvoyTimestampResolution.MICROSECOND))
        return
      end
      seen_bytes = seen_bytes + length
      if seen_bytes > MAX_BYTES_BEFORE_CONTENT then
        note(handle, SKIP, "too_long")
        return
      end
    end
  end
  note(handle, SKIP, "none")
end
