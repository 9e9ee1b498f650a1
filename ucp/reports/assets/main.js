// Assemble the page.

byId('source-name').textContent = facts.source.replace(/\/+$/, '').split('/').pop() || facts.source;
byId('source-name').title = facts.source;
byId('foot').textContent = `Written by ucp ${facts.version}. This page is self-contained: it loads nothing and sends nothing.`;
drawOverview();
drawChecks();
drawRanks();
partitionMap.start();
drawSizes();
parameterTable.start();

const box = byId('search');
let pause = 0;
box.addEventListener('input', () => { clearTimeout(pause); pause = setTimeout(() => search(box.value), total > 3000 ? 120 : 0); });
box.addEventListener('keydown', (event) => {
  if (event.key === 'Escape') { box.value = ''; search(''); box.blur(); }
  if (event.key === 'Enter' && view.shown.length) openDetail(view.shown[0]);
});
document.addEventListener('keydown', (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName);
  if (event.key === '/' && !typing && !event.ctrlKey && !event.metaKey) { event.preventDefault(); box.focus(); box.select(); }
  if (event.key === 'Escape' && !typing) closeDetail();
});
listeners.push(() => {
  byId('search-count').textContent = view.query.trim() ? `${countText(view.shown.length)} of ${countText(total)}` : '';
});
search('');
document.documentElement.dataset.ready = 'yes';
